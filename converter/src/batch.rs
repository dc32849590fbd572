//! Many images, one after the other and several at a time, whatever becomes of each.
//!
//! Every image has a thread of its own, and its layers have theirs; how many layers are worked on at a time is bounded
//! for all images together, so that three images with one layer left each, or one with ten, keep the machine equally
//! busy. An image that takes too long is asked to end, and if it does not (a read that hangs cannot be interrupted) it
//! is given up: its lease ends, its files are removed, and whatever it still tries to write fails.

pub mod list;
mod turns;

pub use list::{Item, ListError, parse};

use crate::progress::Progress;
use fs3_client::{Digest, Store};
use serde::Serialize;
use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};
use turns::{Share, Turns};

/// How long an image may take to end after it was asked to.
const GRACE: Duration = Duration::from_secs(5);
/// How often signals are looked for.
const LOOK: Duration = Duration::from_millis(100);

/// How a batch is run.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Images at a time.
    pub images: usize,
    /// Layers at a time, over all images.
    pub layers: usize,
    /// How long an image may take.
    pub timeout: Option<Duration>,
    /// Whether the first failure ends the batch.
    pub fail_fast: bool,
}

/// What became of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It was converted; in a dry run: it would be.
    Ok,
    /// It was there already.
    Skipped,
    /// It could not be converted.
    Failed,
    /// It took too long.
    Timeout,
    /// The batch was ended before it was done.
    Interrupted,
}

/// An image that is done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Whether it was there already.
    #[serde(skip)]
    pub skipped: bool,
    /// Digest of its manifest in the store.
    pub manifest: Option<Digest>,
    /// Bytes of its source's layers.
    pub bytes: u64,
    /// Its layers.
    pub layers: usize,
    /// Those of them that earlier runs, or other images, had done.
    pub layers_reused: usize,
}

/// An image that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Why, in one sentence.
    pub error: String,
    /// With which code a program would end for it.
    pub exit: u8,
}

/// What became of one image.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Its line in the list.
    pub line: usize,
    /// Where it is.
    pub source: String,
    /// What it is called.
    pub name: String,
    /// How it ended.
    pub status: Status,
    /// What was done.
    #[serde(flatten)]
    pub done: Done,
    /// Time from its begin to its end.
    pub seconds: f64,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Code of its failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<u8>,
}

/// All images together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Images of the list.
    pub images: usize,
    /// Converted.
    pub ok: usize,
    /// There already.
    pub skipped: usize,
    /// Failed.
    pub failed: usize,
    /// Given up after too long a time.
    pub timeout: usize,
    /// Not done, since the batch was ended.
    pub left: usize,
    /// Bytes of the sources of those that were converted.
    pub bytes: u64,
    /// Layers of those.
    pub layers: usize,
    /// Those of them that had been done.
    pub layers_reused: usize,
    /// Time in all.
    pub seconds: f64,
    /// Whether one failed because bytes are damaged.
    pub corrupt: bool,
}

/// Converts one image. It is called from a thread of its own.
pub trait Work: Send + Sync + 'static {
    /// Converts `item` into a writer's store (`None` in a dry run without a store).
    ///
    /// # Errors
    /// Why not.
    fn convert(&self, item: &Item, store: Option<&Store>, progress: &dyn Progress) -> Result<Done, Failure>;

    /// The code of a failure that means damaged bytes.
    fn corrupt(&self) -> u8;
}

/// Watches a batch.
pub trait Watch {
    /// An image begins; what is returned watches it.
    fn started(&mut self, item: &Item) -> Arc<dyn Progress + Send + Sync>;

    /// An image ended.
    fn finished(&mut self, outcome: &Outcome);
}

/// What the outside may do to an image that is being converted.
struct Control {
    cancelled: AtomicBool,
    share: Arc<Share>,
    watch: Arc<dyn Progress + Send + Sync>,
    /// The image's store, once it has one.
    store: Mutex<Option<Store>>,
}

impl Progress for Control {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn turn(&self) -> Box<dyn Any> {
        Box::new(self.share.take(|| self.is_cancelled()))
    }

    fn layer_started(&self, index: usize, bytes: Option<u64>) {
        self.watch.layer_started(index, bytes);
    }

    fn layer_read(&self, index: usize, bytes: u64) {
        self.watch.layer_read(index, bytes);
    }

    fn layer_finished(&self, index: usize, reused: bool) {
        self.watch.layer_finished(index, reused);
    }
}

impl Control {
    fn give_up(&self) {
        self.share.give_up();
        if let Some(store) = &*self.store.lock().unwrap_or_else(PoisonError::into_inner) {
            store.give_up();
        }
    }

    /// The store for this image's thread.
    fn open(&self, store: &Store, item: &Item) -> Result<Store, Failure> {
        let fail = |e: fs3_client::StoreError| Failure { error: e.to_string(), exit: 1 };
        let writer = store.writing(&format!("batch {}", item.name)).map_err(fail)?;
        let mut kept = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_cancelled() {
            return Err(Failure { error: "it was cancelled".to_owned(), exit: 1 });
        }
        *kept = Some(writer.clone());
        Ok(writer)
    }

    /// Lets the lease end with the thread's own clone.
    fn close(&self) {
        drop(self.store.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Why an image was asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    No,
    TooLong(Instant),
    Interrupted(Instant),
}

struct Running {
    item: Item,
    began: Instant,
    asked: Asked,
    control: Arc<Control>,
}

/// Converts all `items`, until `stop` says otherwise.
pub fn run(
    items: Vec<Item>,
    settings: &Settings,
    place: Place<'_>,
    work: &Arc<dyn Work>,
    stop: &AtomicBool,
    watch: &mut dyn Watch,
) -> Totals {
    let began = Instant::now();
    let (results_in, results) = mpsc::channel();
    let turns = Turns::new(settings.layers.max(1));
    let mut totals = Totals { images: items.len(), ..Totals::default() };
    let mut waiting = items.into_iter();
    let mut running: HashMap<usize, Running> = HashMap::new();
    let mut ended = false;
    loop {
        ended |= stop.load(Ordering::Relaxed);
        while !ended && running.len() < settings.images.max(1) {
            let Some(item) = waiting.next() else { break };
            let control = Arc::new(Control {
                cancelled: AtomicBool::new(false),
                share: Share::new(&turns),
                watch: watch.started(&item),
                store: Mutex::new(None),
            });
            let began = Instant::now();
            start(item.clone(), &control, place, Arc::clone(work), results_in.clone());
            running.insert(item.line, Running { item, began, asked: Asked::No, control });
        }
        if running.is_empty() {
            break;
        }
        let result = results.recv_timeout(LOOK).ok();
        if let Some((line, result)) = result
            && let Some(image) = running.remove(&line)
        {
            let outcome = image.outcome(Some(result));
            ended |= settle(&outcome, &mut totals, work.corrupt()) && settings.fail_fast;
            watch.finished(&outcome);
        }
        for image in running.values_mut() {
            image.ask(ended, settings.timeout);
        }
        let hanging: Vec<usize> = running.iter().filter(|(_, image)| image.hangs()).map(|(line, _)| *line).collect();
        for line in hanging {
            let Some(image) = running.remove(&line) else { continue };
            image.control.give_up();
            let outcome = image.outcome(None);
            ended |= settle(&outcome, &mut totals, work.corrupt()) && settings.fail_fast;
            watch.finished(&outcome);
        }
    }
    totals.left += waiting.count();
    totals.seconds = began.elapsed().as_secs_f64();
    totals
}

/// Where a batch puts its images.
#[derive(Debug, Clone, Copy)]
pub enum Place<'s> {
    /// Into a store, as a writer.
    Store(&'s Store),
    /// Nowhere: what is there (if there is a store) is only looked at.
    DryRun(Option<&'s Store>),
}

type Results = mpsc::Sender<(usize, Result<Done, Failure>)>;

fn start(item: Item, control: &Arc<Control>, place: Place<'_>, work: Arc<dyn Work>, results: Results) {
    let control = Arc::clone(control);
    let (store, writes) = match place {
        Place::Store(store) => (Some(store.clone()), true),
        Place::DryRun(store) => (store.cloned(), false),
    };
    // Not scoped: a thread that hangs is left behind.
    std::thread::spawn(move || {
        let convert = || match store {
            Some(store) if writes => {
                let store = control.open(&store, &item)?;
                work.convert(&item, Some(&store), &*control)
            }
            store => work.convert(&item, store.as_ref(), &*control),
        };
        let result = catch_unwind(AssertUnwindSafe(convert));
        control.close();
        let result = result.unwrap_or_else(|_| {
            Err(Failure { error: "this program has a fault: the conversion panicked".to_owned(), exit: 1 })
        });
        // Nobody listens any more when it was given up.
        let _ = results.send((item.line, result));
    });
}

/// Counts an image; tells whether it failed.
fn settle(outcome: &Outcome, totals: &mut Totals, corrupt: u8) -> bool {
    match outcome.status {
        Status::Ok => totals.ok += 1,
        Status::Skipped => totals.skipped += 1,
        Status::Failed => totals.failed += 1,
        Status::Timeout => totals.timeout += 1,
        Status::Interrupted => totals.left += 1,
    }
    if outcome.status == Status::Ok {
        totals.bytes += outcome.done.bytes;
        totals.layers += outcome.done.layers;
        totals.layers_reused += outcome.done.layers_reused;
    }
    totals.corrupt |= outcome.exit == Some(corrupt);
    matches!(outcome.status, Status::Failed | Status::Timeout)
}

impl Running {
    /// Asks the image to end, where there is a reason.
    fn ask(&mut self, ended: bool, timeout: Option<Duration>) {
        if self.asked != Asked::No {
            return;
        }
        if timeout.is_some_and(|timeout| self.began.elapsed() >= timeout) {
            self.asked = Asked::TooLong(Instant::now());
        } else if ended {
            self.asked = Asked::Interrupted(Instant::now());
        } else {
            return;
        }
        self.control.cancelled.store(true, Ordering::Relaxed);
    }

    fn hangs(&self) -> bool {
        match self.asked {
            Asked::No => false,
            Asked::TooLong(since) | Asked::Interrupted(since) => since.elapsed() >= GRACE,
        }
    }

    /// `None` when it was given up.
    fn outcome(self, result: Option<Result<Done, Failure>>) -> Outcome {
        let took = self.began.elapsed();
        let late = |hangs: &str| format!("it was not done after {:.0} s{hangs}", took.as_secs_f64());
        let (status, done, error, exit) = match (result, self.asked) {
            // Done after all.
            (Some(Ok(done)), _) if done.skipped => (Status::Skipped, done, None, None),
            (Some(Ok(done)), _) => (Status::Ok, done, None, None),
            (Some(Err(e)), Asked::No) => (Status::Failed, Done::default(), Some(e.error), Some(e.exit)),
            (Some(Err(_)), Asked::TooLong(_)) => (Status::Timeout, Done::default(), Some(late("")), Some(1)),
            (None, Asked::TooLong(_)) => {
                let error = late(", and did not end when it was asked to");
                (Status::Timeout, Done::default(), Some(error), Some(1))
            }
            (_, Asked::Interrupted(_)) | (None, Asked::No) => (Status::Interrupted, Done::default(), None, None),
        };
        let (line, source, name) = (self.item.line, self.item.source.to_string(), self.item.name.to_string());
        Outcome { line, source, name, status, done, seconds: took.as_secs_f64(), error, exit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;
    use std::io::Write as _;

    struct Quiet(Vec<Outcome>);

    impl Watch for Quiet {
        fn started(&mut self, _: &Item) -> Arc<dyn Progress + Send + Sync> {
            Arc::new(Silent)
        }

        fn finished(&mut self, outcome: &Outcome) {
            self.0.push(outcome.clone());
        }
    }

    /// The image `hangs` never ends, and has all turns and a file; `panics` does; others need a turn.
    struct Odd;

    impl Work for Odd {
        fn convert(&self, item: &Item, store: Option<&Store>, progress: &dyn Progress) -> Result<Done, Failure> {
            let store = store.unwrap();
            let _turn = progress.turn();
            match item.name.name() {
                "hangs" => {
                    let staged = store.stage("data").unwrap();
                    (&*staged).write_all(b"x").unwrap();
                    loop {
                        std::thread::park();
                    }
                }
                "panics" => panic!("as it should"),
                _ => {
                    assert!(!progress.is_cancelled());
                    Ok(Done { layers: 1, ..Done::default() })
                }
            }
        }

        fn corrupt(&self) -> u8 {
            3
        }
    }

    #[test]
    fn who_hangs_is_given_up_and_the_rest_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let items = parse(b"oci:a hangs\noci:b panics\noci:c good\n").unwrap();
        let settings = Settings { images: 1, layers: 1, timeout: Some(Duration::from_secs(2)), fail_fast: false };
        let mut watch = Quiet(Vec::new());
        let stop = AtomicBool::new(false);
        let work: Arc<dyn Work> = Arc::new(Odd);
        let totals = run(items, &settings, Place::Store(&store), &work, &stop, &mut watch);
        let statuses: Vec<Status> = watch.0.iter().map(|outcome| outcome.status).collect();
        assert_eq!(statuses, [Status::Timeout, Status::Failed, Status::Ok]);
        assert!(watch.0[0].error.as_ref().unwrap().contains("did not end when it was asked to"));
        assert_eq!((totals.ok, totals.failed, totals.timeout, totals.left), (1, 1, 1, 0));
        assert_eq!(std::fs::read_dir(store.scratch()).unwrap().count(), 0, "its file is gone");
        assert!(store.leases().unwrap().is_empty(), "its lease has ended");
    }
}
