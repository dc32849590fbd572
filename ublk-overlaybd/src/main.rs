//! `ublk-overlaybd`: see `ublk-overlaybd --help`.
#![allow(clippy::print_stderr)]

mod cli;

fn main() -> std::process::ExitCode {
    // `RUST_LOG=debug` shows what the library does; without it, warnings alone.
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    cli::run()
}
