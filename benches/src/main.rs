//! Every benchmark, peers side by side.
//!
//! `cargo run --release -p benches -- list` names them; each has goals, and says whether they are reached.
//! Contenders run as child processes in interleaved rounds ([`measure`]), on real layers ([`data`]); what none of them
//! can do without is a contender too ([`limit`]).

mod backends;
mod batch;
mod cache;
mod chunks;
mod cli;
mod compress;
mod contenders;
mod convert;
mod data;
mod dedup;
mod hash;
mod inflate;
mod limit;
mod measure;
mod merge;
mod overlaybd;
mod place;
mod report;
mod stages;
mod sys;
mod tool;

use anyhow::Result;
use clap::Parser as _;
use cli::{BENCHES, Child, Cli, Command, Setting};
use report::Report;

fn main() -> Result<()> {
    let cli = Cli::parse();
    match cli.command {
        Command::List => BENCHES.iter().for_each(|(name, what)| report::line(&format!("{name:<10} {what}"))),
        Command::Backends { dir, rounds } => backends::run(&dir, rounds)?.print(cli.json)?,
        Command::Batch(args) => batch::run(&args)?.print(cli.json)?,
        Command::Cache(args) => cache::run(&args)?.print(cli.json)?,
        Command::Compress(args) => compress::run(&args)?.print(cli.json)?,
        Command::Convert(args) => convert::run(&args)?.print(cli.json)?,
        Command::Limit(setting) => limit_stages(&setting)?.print(cli.json)?,
        Command::Hash { rounds } => hash::run(rounds).print(cli.json)?,
        Command::Chunks { dir, rounds } => chunks::run(&data::image(&[])?, &dir, rounds)?.print(cli.json)?,
        Command::Dedup { dir, rounds } => dedup::run(&data::related::images()?, &dir, rounds)?.print(cli.json)?,
        Command::Merge(args) => merge::run(&args)?.print(cli.json)?,
        Command::Overlaybd(args) => overlaybd::run(&args)?.print(cli.json)?,
        Command::Data => {
            for layer in data::image(&[])?.layers {
                let (name, blob) = (&layer.name, layer.blob.display());
                report::line(&format!("{name}: {blob}, {} bytes, {} plain", layer.size, layer.plain_size));
            }
        }
        Command::Child { child: Child::Limit { layout, out, jobs, fsync } } => {
            limit::run(&limit::sources(&layout)?, &out, jobs, fsync)?;
        }
        Command::Child { child: Child::StandIn } => backends::serve(),
        Command::Child { child: Child::Cache { what, dir } } => cache::child(&what, &dir)?,
        Command::Child { child: Child::MergeLimit { out, images } } => merge::limit_child(&images, &out)?,
    }
    Ok(())
}

fn limit_stages(setting: &Setting) -> Result<Report> {
    let image = data::image(&setting.layers)?;
    let room = image.layers.iter().map(|layer| layer.plain_size).max().unwrap_or(0);
    let place = place::Place::new(setting.dir.as_deref(), room + room / 8)?;
    let layers = limit::sources(&image.layout)?;
    let metrics = stages::measure(&layers, &place, setting.rounds)?;
    Ok(Report { bench: "limit", setting: convert::describe(&image, &place), metrics, missing: Vec::new() })
}
