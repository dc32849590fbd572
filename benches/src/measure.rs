//! Contenders as child processes, in interleaved rounds.

use crate::sys;
use anyhow::{Context as _, Result, anyhow, bail};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// Makes the commands that do the whole task into the given directory.
pub(crate) type MakeCommands = Box<dyn Fn(&Path) -> Result<Vec<Command>>>;
/// Looks at the directory afterwards and fails if the task was not done.
pub(crate) type CheckOutput = Box<dyn Fn(&Path) -> Result<()>>;

/// Someone who does the task.
pub(crate) struct Contender {
    /// What the report calls it.
    pub(crate) name: String,
    /// What it runs: several commands are run side by side, as many as there are jobs.
    pub(crate) commands: MakeCommands,
    /// Whether it did it.
    pub(crate) check: CheckOutput,
}

/// What one run took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    /// From the start of the first command to the end of the last.
    pub(crate) wall: Duration,
    /// User and system time of all its processes.
    pub(crate) cpu: Duration,
    /// Largest resident set of any one process, in bytes.
    pub(crate) peak_rss: u64,
}

/// Runs every contender once a round, one after the other, and gives each one's runs in order.
///
/// What the machine does beside falls on all of them alike that way. Before each run, dirty pages are written back and
/// `inputs` are read, so that nobody pays for the one before or for a cold page cache.
pub(crate) fn rounds(
    contenders: &[Contender],
    rounds: usize,
    jobs: usize,
    inputs: &[&Path],
    dir: &Path,
) -> Result<Vec<Vec<Run>>> {
    let mut runs: Vec<Vec<Run>> = contenders.iter().map(|_| Vec::with_capacity(rounds)).collect();
    for round in 1..=rounds {
        for (contender, runs) in contenders.iter().zip(&mut runs) {
            crate::report::progress(&format!("round {round} of {rounds}: {}", contender.name));
            let out = dir.join("out");
            fs::create_dir(&out)?;
            settle(inputs)?;
            let run = once(contender, &out, &dir.join("stderr"), jobs);
            let run = run.with_context(|| contender.name.clone())?;
            (contender.check)(&out).with_context(|| format!("{} did not do the task", contender.name))?;
            runs.push(run);
            fs::remove_dir_all(&out)?;
        }
    }
    Ok(runs)
}

fn settle(inputs: &[&Path]) -> Result<()> {
    if !Command::new("sync").status().context("cannot run sync")?.success() {
        bail!("sync failed");
    }
    for input in inputs {
        std::io::copy(&mut File::open(input)?, &mut std::io::sink())?;
    }
    Ok(())
}

/// Runs one contender's commands and adds up what they used.
fn once(contender: &Contender, out: &Path, stderr: &Path, jobs: usize) -> Result<Run> {
    let commands = (contender.commands)(out)?;
    let workers = jobs.min(commands.len());
    let queue = Mutex::new(commands.into_iter().enumerate());
    let start = Instant::now();
    let used: Result<Vec<sys::Used>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    let mut sum = sys::Used::default();
                    loop {
                        let next = queue.lock().map_err(|_| anyhow!("another command's thread panicked"))?.next();
                        let Some((n, command)) = next else { return Ok(sum) };
                        let used = command_once(command, &stderr.with_extension(n.to_string()))?;
                        sum.cpu += used.cpu;
                        sum.peak_rss = sum.peak_rss.max(used.peak_rss);
                    }
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().map_err(|_| anyhow!("a command's thread panicked"))?).collect()
    });
    let wall = start.elapsed();
    let used = used?;
    Ok(Run {
        wall,
        cpu: used.iter().map(|used| used.cpu).sum(),
        peak_rss: used.iter().map(|used| used.peak_rss).max().unwrap_or(0),
    })
}

fn command_once(mut command: Command, stderr: &Path) -> Result<sys::Used> {
    command.stdin(Stdio::null()).stderr(File::create(stderr)?);
    let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    let (status, used) = sys::wait(child)?;
    if !status.success() {
        let text = fs::read(stderr)?;
        let tail = String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned();
        bail!("{command:?}: {status}\n{}", tail.trim());
    }
    Ok(used)
}

/// The middle of some values and how far they lie apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    /// The median.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
}

impl Spread {
    /// Of at least one value.
    ///
    /// # Panics
    /// Without any value.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Self { median: f64::midpoint(low, high), min: values[0], max: values[values.len() - 1] }
    }

    /// Of the quotients of two contenders' values, round by round: what disturbed one round disturbed both.
    pub(crate) fn of_ratios(over: &[Run], under: &[Run], value: impl Fn(&Run) -> f64) -> Self {
        Self::of(over.iter().zip(under).map(|(over, under)| value(over) / value(under)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, script: &'static str) -> Contender {
        Contender {
            name: name.to_owned(),
            commands: Box::new(move |out| {
                let mut command = Command::new("sh");
                command.args(["-c", script]).current_dir(out).stdout(Stdio::null());
                Ok(vec![command])
            }),
            check: Box::new(|out| fs::metadata(out.join("done")).map(drop).map_err(Into::into)),
        }
    }

    #[test]
    fn rounds_are_interleaved_and_start_empty() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let two = [
            shell("one", "test ! -e done && echo one >>../log && touch done"),
            shell("two", "test ! -e done && echo two >>../log && touch done"),
        ];
        let runs = rounds(&two, 2, 2, &[], dir.path()).unwrap();
        assert_eq!(fs::read_to_string(log).unwrap(), "one\ntwo\none\ntwo\n");
        assert!(runs.iter().all(|runs| runs.len() == 2 && runs.iter().all(|run| run.peak_rss > 0)));
    }

    #[test]
    fn failures_name_the_contender_and_its_words() {
        for (script, words) in [("echo sorry >&2; exit 4", "sorry"), ("true", "did not do the task")] {
            let dir = tempfile::tempdir().unwrap();
            let error = rounds(&[shell("clumsy", script)], 1, 1, &[], dir.path()).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains("clumsy") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn commands_of_one_contender_run_side_by_side() {
        let dir = tempfile::tempdir().unwrap();
        let sleepers = Contender {
            name: "sleepers".to_owned(),
            commands: Box::new(|_| {
                let sleep = || {
                    let mut command = Command::new("sleep");
                    command.arg("0.3");
                    command
                };
                Ok(vec![sleep(), sleep()])
            }),
            check: Box::new(|_| Ok(())),
        };
        let wall = |jobs| {
            let dir = tempfile::tempdir_in(dir.path()).unwrap();
            rounds(std::slice::from_ref(&sleepers), 1, jobs, &[], dir.path()).unwrap()[0][0].wall
        };
        assert!(wall(1) >= Duration::from_millis(600));
        assert!(wall(2) < wall(1));
    }

    #[test]
    fn medians() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of([4.0, 1.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
        let run = |ms| Run { wall: Duration::from_millis(ms), cpu: Duration::ZERO, peak_rss: 0 };
        let ratios = Spread::of_ratios(&[run(30), run(80)], &[run(10), run(20)], |run| run.wall.as_secs_f64());
        assert!((ratios.min - 3.0).abs() < 1e-9 && (ratios.max - 4.0).abs() < 1e-9);
    }
}
