//! `dsec-convert`: see `dsec-convert --help`.
#![allow(clippy::print_stderr)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
