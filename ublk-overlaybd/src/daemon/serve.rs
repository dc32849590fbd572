//! The life of the daemon itself.

use super::config::Config;
use super::devices::Devices;
use super::disk::Opener;
use super::http::{self, Control};
use super::protocol::Happened;
use super::table::{Table, TableError};
use crate::backend::Blobs;
use crate::ublk::device::Service;
use crate::ublk::support::{Support, Unsupported};
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError<E> {
    /// What has blobs cannot be opened.
    #[error("{0}")]
    Blobs(E),
    /// Not on this kernel.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// Its table cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Its socket cannot be made.
    #[error("{path}: cannot listen there")]
    Socket {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It cannot have a mount namespace.
    #[error("cannot have a mount namespace of its own: it needs CAP_SYS_ADMIN")]
    Namespace(#[source] io::Error),
    /// The machine gives it no threads, signals, or boot id.
    #[error("cannot start")]
    Io(#[from] io::Error),
}

/// How it ended.
#[derive(Debug)]
pub enum Ended {
    /// It was told to end, and left its devices to the next one.
    Told,
    /// It was told to become what its program is now, which failed.
    NotUpgraded(io::Error),
}

/// Serves until it is told to end. Must be called before there are other threads. `blobs` opens what has layers that are in
/// no file.
///
/// # Errors
/// When it cannot start.
pub fn serve<E>(
    config: &Config,
    blobs: impl FnOnce() -> Result<Option<Box<dyn Blobs>>, E>,
) -> Result<Ended, ServeError<E>> {
    // Before anything is touched: two daemons never have one table.
    let support = Support::probe()?;
    if let Some(doubt) = support.doubt() {
        tracing::warn!("{doubt}");
    }
    let (table, records, damaged) = Table::open(&config.state)?;
    super::namespace::own().map_err(ServeError::Namespace)?;
    // Kept for an upgrade, before the file is replaced.
    let program = std::env::current_exe()?;
    let service = Service::new(support, config.threads, config.defaults.request, config.defaults.operation);
    let opener = Opener::new(blobs().map_err(ServeError::Blobs)?);
    let devices = Arc::new(Devices::new(service, support, table, opener, config.defaults)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // Before anybody can ask for anything: names are taken, and what nobody knows is gone.
    let found = devices.survey(records, &damaged);
    let ended = runtime.block_on(async {
        let (upgrade, upgrades) = mpsc::channel(1);
        let ready = Arc::new(AtomicBool::new(false));
        let deadline = config.defaults.operation;
        let control = Control { devices: Arc::clone(&devices), ready: Arc::clone(&ready), upgrade, deadline };
        let listener = listen(&config.socket)?;
        let served = tokio::spawn(async move { axum::serve(listener, http::router(control)).await });
        let taking = Arc::clone(&devices);
        tokio::task::spawn_blocking(move || {
            taking.recover(found);
            ready.store(true, Ordering::Release);
            let recovered = taking.recovered();
            taking.events.tell(Happened::Ready, None, Some(format!("{} devices", recovered.recovered)));
            notify("READY=1");
        });
        Devices::keep_up(&devices)?;
        let wish = wait(upgrades).await?;
        served.abort();
        Ok::<_, ServeError<E>>(wish)
    })?;
    devices.events.tell(Happened::Ending, None, None);
    devices.flush_all();
    // Nothing is taken down: a device that lost its owner would be removed.
    std::mem::forget(devices);
    runtime.shutdown_background();
    match ended {
        Wish::End => Ok(Ended::Told),
        Wish::Upgrade => {
            notify("RELOADING=1");
            // The kernel sees this process let go of the devices, as if it had died, and the new one takes them over.
            Ok(Ended::NotUpgraded(become_anew(&program)))
        }
    }
}

enum Wish {
    End,
    Upgrade,
}

async fn wait(mut upgrades: mpsc::Receiver<()>) -> io::Result<Wish> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = terminate.recv() => Wish::End,
        _ = interrupt.recv() => Wish::End,
        _ = hangup.recv() => Wish::Upgrade,
        Some(()) = upgrades.recv() => Wish::Upgrade,
    })
}

/// Listens at `path`, for root alone. Whoever has the table has the socket: what is there is left over.
fn listen<E>(path: &Path) -> Result<UnixListener, ServeError<E>> {
    let socket = |source| ServeError::Socket { path: path.to_owned(), source };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(socket)?;
    }
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&beside);
    let listener = UnixListener::bind(&beside).map_err(socket)?;
    // It gets its name when it is closed to others.
    std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600)).map_err(socket)?;
    std::fs::rename(&beside, path).map_err(socket)?;
    Ok(listener)
}

/// Replaces this process by the program that is at its path now, with the same arguments. Returns only when that fails.
fn become_anew(program: &Path) -> io::Error {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| OsString::from("ublk-overlaybd"));
    std::process::Command::new(program).arg0(name).args(arguments).exec()
}

/// Tells systemd, if it is there (`sd_notify(3)`).
fn notify(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let told = UnixDatagram::unbound().and_then(|from| {
        use std::os::linux::net::SocketAddrExt as _;
        use std::os::unix::ffi::OsStrExt as _;
        let address = match socket.as_bytes() {
            [b'@', name @ ..] => std::os::unix::net::SocketAddr::from_abstract_name(name)?,
            _ => std::os::unix::net::SocketAddr::from_pathname(&socket)?,
        };
        from.send_to_addr(state.as_bytes(), &address)
    });
    if let Err(error) = told {
        tracing::warn!("cannot tell the service manager: {error}");
    }
}
