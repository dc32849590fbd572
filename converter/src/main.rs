//! `dsec-convert`: see `dsec-convert --help`.
#![allow(clippy::print_stderr)]

mod cli;

fn main() -> std::process::ExitCode {
    // `RUST_LOG=debug` shows what the library does; without it, nothing.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    cli::run()
}
