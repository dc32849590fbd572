//! `layerd`: see `layerd --help`.

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    layerd::cli::Cli::parse().run()
}
