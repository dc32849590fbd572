//! What tests of registries need: the program in a home of its own, images in a registry, and servers that misbehave.

use crate::program::said;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

/// `dsec-convert` with `args`, by somebody who has no files with credentials or mirrors.
pub(crate) fn dsec(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    command.args(args).env("HOME", home).env("CONTAINERS_REGISTRIES_CONF", "/dev/null");
    for name in
        ["XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "http_proxy", "HTTP_PROXY"]
    {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs to the end; what was said and the exit code.
pub(crate) fn outcome(command: &mut Command) -> (i32, String) {
    let output: Output = command.output().unwrap();
    (output.status.code().unwrap_or(-1), said(&output))
}

/// Asserts that a run fails with `code`, and says all of `parts` in one sentence with a hint at most.
#[track_caller]
pub(crate) fn fails(command: &mut Command, code: i32, parts: &[&str]) {
    let (found, said) = outcome(command);
    assert_eq!(found, code, "{said}");
    for part in parts {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
    // Wrong usage is told with a word about the usage.
    assert!(code == 2 || said.lines().count() <= 2, "{said}");
}

/// An answer of a [`Server`].
#[derive(Debug, Clone, Default)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into() }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

/// What a [`Server`] was asked.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: BTreeMap<String, String>,
}

/// An HTTP server that answers as a test likes; it lives as long as the process.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    pub(crate) fn start(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (log, answer) = (Arc::clone(&asked), Arc::new(answer));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
                thread::spawn(move || drop(serve(&client, &log, &*answer)));
            }
        });
        Self { address, asked }
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve(mut client: &TcpStream, log: &Mutex<Vec<Asked>>, answer: &dyn Fn(&Asked) -> Answer) -> std::io::Result<()> {
    let mut reader = BufReader::new(client);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut words = first.split_ascii_whitespace().map(str::to_owned);
    let (Some(method), Some(target)) = (words.next(), words.next()) else { return Ok(()) };
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    let length: u64 = headers.get("content-length").and_then(|text: &String| text.parse().ok()).unwrap_or(0);
    std::io::copy(&mut reader.take(length), &mut std::io::sink())?;
    let asked = Asked { method, target, headers };
    log.lock().unwrap().push(asked.clone());
    let Answer { status, headers, body } = answer(&asked);
    let mut head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !head.contains("content-length") {
        head += &format!("content-length: {}\r\n", body.len());
    }
    client.write_all((head + "\r\n").as_bytes())?;
    if asked.method != "HEAD" {
        client.write_all(&body)?;
    }
    Ok(())
}
