//! Finding credentials: which files there are, and the helper programs they name.

use super::RegistryError;
use super::auth_file::{self, AuthFile, Credentials, Entry};
use super::reference::{Place, printable};
use std::env;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest that a helper may take; some ask a network.
const HELPER_TIME: Duration = Duration::from_secs(30);
/// Most bytes that a helper may print.
const HELPER_OUTPUT: u64 = 1 << 20;

/// The files to look into, in their order. `explicit` is the only one if given, and must exist then.
pub(super) fn find(explicit: Option<&Path>, place: &Place) -> Result<Option<Credentials>, RegistryError> {
    let named = explicit
        .map(Path::to_owned)
        .or_else(|| env::var_os("REGISTRY_AUTH_FILE").filter(|v| !v.is_empty()).map(PathBuf::from));
    let files = named.as_ref().map_or_else(usual_files, |file| vec![file.clone()]);
    for path in files {
        let Some(bytes) = read(&path)? else {
            if explicit.is_some() {
                return Err(RegistryError::setup(&path, "there is no such file"));
            }
            continue;
        };
        let file = AuthFile::parse(&bytes)
            .map_err(|e| RegistryError::setup(&path, format!("it is no file of credentials: {e}")))?;
        let found = match file.find(place).map_err(|e| RegistryError::setup(&path, e))? {
            Some(Entry::Credentials(credentials)) => Some(credentials),
            Some(Entry::Helper { name, server }) => ask(&path, &name, &server)?,
            None => None,
        };
        if let Some(found) = found {
            tracing::debug!("credentials for {place} from {}", path.display());
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// podman's files, then docker's.
fn usual_files() -> Vec<PathBuf> {
    let dir = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = dir("HOME");
    let config = dir("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
    let docker = dir("DOCKER_CONFIG").or_else(|| home.map(|home| home.join(".docker")));
    let runtime = dir("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json"));
    let config = config.map(|dir| dir.join("containers/auth.json"));
    let docker = docker.map(|dir| dir.join("config.json"));
    [runtime, config, docker].into_iter().flatten().collect()
}

/// A small file whole; `None` when there is none.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, RegistryError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
        Err(e) => return Err(RegistryError::setup(path, e.to_string())),
    };
    let mut bytes = Vec::new();
    file.take(auth_file::LIMIT + 1).read_to_end(&mut bytes).map_err(|e| RegistryError::setup(path, e.to_string()))?;
    if bytes.len() as u64 > auth_file::LIMIT {
        return Err(RegistryError::setup(
            path,
            format!("it has more than the {} bytes that are read", auth_file::LIMIT),
        ));
    }
    Ok(Some(bytes))
}

/// Asks `docker-credential-NAME` for a server's credentials; `None` when it has none.
fn ask(file: &Path, name: &str, server: &str) -> Result<Option<Credentials>, RegistryError> {
    let fail =
        |why: String| RegistryError::Helper { helper: printable(name, 100), server: printable(server, 300), why };
    if name.contains('/') {
        return Err(RegistryError::setup(
            file,
            format!("`{}` cannot be the name of a credential helper", printable(name, 100)),
        ));
    }
    let mut command = Command::new(format!("docker-credential-{name}"));
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| fail(format!("it does not start: {e}")))?;
    let answer = exchange(&mut child, server);
    if answer.is_err() {
        let _ = child.kill();
    }
    let status = wait(&mut child).map_err(|e| fail(e.to_string()))?;
    let answer = answer.map_err(|e| fail(e.to_string()))?;
    if status.success() {
        return auth_file::parse_helper(&answer).map(Some).map_err(|e| fail(format!("its answer is not valid: {e}")));
    }
    // The protocol's fixed sentence, on standard output.
    let said = String::from_utf8_lossy(&answer);
    if said.contains("credentials not found") {
        return Ok(None);
    }
    Err(fail(format!("it ended with {status}: {}", printable(said.trim(), 300))))
}

/// Tells the helper the server's name and reads what it prints, within its time.
fn exchange(child: &mut Child, server: &str) -> io::Result<Vec<u8>> {
    if let Some(mut stdin) = child.stdin.take() {
        // One that knows without asking may be gone already.
        let _ = stdin.write_all(server.as_bytes());
    }
    let stdout = child.stdout.take();
    let (done, answer) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.map_or(Ok(0), |stdout| stdout.take(HELPER_OUTPUT).read_to_end(&mut bytes));
        let _ = done.send(read.map(|_| bytes));
    });
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("it gave no answer within {HELPER_TIME:?}"));
    answer.recv_timeout(HELPER_TIME).map_err(|_| late())?
}

fn wait(child: &mut Child) -> io::Result<std::process::ExitStatus> {
    let until = Instant::now() + HELPER_TIME;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > until {
            let _ = child.kill();
            return child.wait();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
