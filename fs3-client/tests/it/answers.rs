//! What a server may answer to a request for a range: the range, or something else. A server that tells the truth about
//! what it sends gets no wrong byte past a client, and one that does not make sense gets an error.

use crate::support::QUICK;
use fixtures::s3::S3Server;
use fs3_client::blob_store::retry::Policy;
use fs3_client::blob_store::s3::{S3Blobs, S3Bucket};
use fs3_client::registry::{Client, ImageRef, Options, RegistryStore};
use fs3_client::testing::conformance::contents;
use fs3_client::{BlobStore, Digest};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;

const SIZE: usize = 10_000;

/// What is sent.
#[derive(Debug, Clone)]
struct Answer {
    status: u16,
    /// Bytes of the blob, of which the body consists.
    body: Range<usize>,
    /// Value of `Content-Range`.
    range: Option<String>,
    /// What `Content-Length` says over the body's length, if anything.
    length: Option<usize>,
    /// Whether it is asked for elsewhere first, where nobody knows of ranges any more or all is as it was.
    redirected: bool,
}

impl Answer {
    fn write(&self, blob: &[u8], mut to: &TcpStream) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Answer\r\nConnection: close\r\nETag: \"x\"\r\n", self.status);
        head += "Last-Modified: Tue, 01 Dec 2026 00:00:00 GMT\r\n";
        if let Some(range) = &self.range {
            head += &format!("Content-Range: {range}\r\n");
        }
        if let Some(more) = self.length {
            head += &format!("Content-Length: {}\r\n", self.body.len() + more);
        }
        to.write_all(format!("{head}\r\n").as_bytes())?;
        to.write_all(&blob[self.body.clone()])
    }
}

/// A server that has one answer to all questions.
struct Server {
    address: SocketAddr,
    answer: Arc<Mutex<Answer>>,
}

impl Server {
    fn start(blob: Arc<[u8]>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answer = Arc::new(Mutex::new(whole()));
        let next = Arc::clone(&answer);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), blob, next) = (stream, Arc::clone(&blob), Arc::clone(&next)) else { return };
                std::thread::spawn(move || drop(serve(&stream, &blob, &next)));
            }
        });
        Self { address, answer }
    }

    fn says(&self, answer: &Answer) {
        *self.answer.lock().unwrap() = answer.clone();
    }
}

fn serve(stream: &TcpStream, blob: &[u8], next: &Mutex<Answer>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let answer = next.lock().unwrap().clone();
    let mut to = stream;
    if first.contains(" /v2/ ") {
        return to.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    }
    if answer.redirected && !first.contains("elsewhere") {
        let place = stream.local_addr()?;
        let moved = "HTTP/1.1 307 Moved\r\nConnection: close\r\nContent-Length: 0\r\n";
        return to.write_all(format!("{moved}Location: http://{place}/elsewhere\r\n\r\n").as_bytes());
    }
    answer.write(blob, to)
}

fn whole() -> Answer {
    Answer { status: 200, body: 0..SIZE, range: None, length: Some(0), redirected: false }
}

fn registry(address: SocketAddr) -> RegistryStore {
    let options =
        Options { plain_http: true, timeout: Duration::from_secs(5), retry: Policy::once(), ..Options::default() };
    let image: ImageRef = format!("{address}/team/blobs").parse().unwrap();
    RegistryStore::new(Client::new(options).unwrap().target(image.place()).unwrap())
}

fn s3(address: SocketAddr) -> S3Blobs {
    let settings = S3Server::environment(&format!("http://{address}"));
    let settings = settings.iter().map(|(name, value)| (*name, value.as_str()));
    S3Blobs::new(S3Bucket::from_settings(settings, "bucket", "x").unwrap(), Policy::once())
}

/// Z03: ranges that are ignored, moved, cut, unnamed, too long, and redirected.
#[test]
fn z03_answers_to_another_question() {
    let blob: Arc<[u8]> = contents(1, SIZE as u64).to_vec().into();
    let server = Server::start(Arc::clone(&blob));
    let (runtime, digest) = (Runtime::new().unwrap(), Digest::of(&blob));
    let (registry, s3) = (registry(server.address), s3(server.address));
    let part = |body: Range<usize>, text: &str| {
        let range = (!text.is_empty()).then(|| text.to_owned());
        Answer { status: 206, body, range, length: Some(0), redirected: false }
    };
    let right = part(2000..3000, "bytes 2000-2999/10000");
    let moved = Answer { redirected: true, ..right.clone() };
    let dropped = Answer { redirected: true, ..whole() };
    // (what it says, whether a registry's client makes use of it, whether S3's does)
    for (answer, by_registry, by_s3) in [
        (&right, true, true),
        (&moved, true, true),
        (&whole(), true, false),
        (&dropped, true, false),
        (&part(2001..3001, "bytes 2001-3000/10000"), false, false),
        (&part(0..1000, "bytes 0-999/10000"), false, false),
        (&part(2000..3000, ""), false, false),
        (&part(2000..3000, "bytes 2000-2999/2999"), false, false),
        (&part(2000..3000, "items 2000-2999/10000"), false, false),
        (&part(2000..2500, "bytes 2000-2999/10000"), false, false),
        (&Answer { length: Some(500), ..part(2000..2500, "bytes 2000-2999/10000") }, false, false),
        (&Answer { length: None, ..part(2000..2999, "bytes 2000-2999/10000") }, false, false),
        (&Answer { body: 0..2500, ..whole() }, false, false),
        (&Answer { body: 0..2500, length: Some(7500), ..whole() }, false, false),
    ] {
        server.says(answer);
        for (name, store, good) in [("registry", &registry as &dyn BlobStore, by_registry), ("s3", &s3, by_s3)] {
            match runtime.block_on(store.read_range(&digest, 2000..3000)) {
                Ok(read) => {
                    assert!(good && read[..] == blob[2000..3000], "{name} made {} bytes of {answer:?}", read.len())
                }
                Err(error) => assert!(!good, "{name} refused {answer:?}: {error}"),
            }
        }
    }
}

fn answers() -> impl Strategy<Value = (Range<u64>, Answer)> {
    let asked = (0..SIZE as u64, 1..3000u64).prop_map(|(start, len)| start..(start + len).min(SIZE as u64));
    let status = prop::sample::select(vec![200u16, 200, 206, 206, 206, 206, 204, 301, 404, 416, 500]);
    let near = (-2i64..=2, -2i64..=2, any::<bool>(), 0..SIZE, 0..SIZE);
    let total = prop::sample::select(vec!["10000", "10000", "*", "9999", "10001", "", "18446744073709551616"]);
    let length = prop::sample::select(vec![Some(0), Some(0), Some(0), Some(1), Some(900), None]);
    let text = prop::option::weighted(0.8, prop::option::weighted(0.2, "[ -~]{0,30}"));
    (asked, status, near, total, length, text, any::<bool>()).prop_map(
        |(asked, status, (before, after, is_near, a, b), total, length, text, redirected)| {
            let edge = |at: u64, by: i64| usize::try_from(i64::try_from(at).unwrap() + by).unwrap_or(0).min(SIZE);
            let (a, b) = if is_near { (edge(asked.start, before), edge(asked.end, after)) } else { (a, b) };
            // What is called the whole is that, or ends early.
            let body = match status {
                200 if is_near => 0..SIZE,
                200 => 0..a.max(b),
                _ => a.min(b)..a.max(b),
            };
            // It tells what it sends, or something that means nothing.
            let told = format!("bytes {}-{}/{total}", body.start, body.end.saturating_sub(1));
            let range = text.map(|text| text.filter(|text| !text.contains('-')).unwrap_or(told));
            (asked, Answer { status, body, range, length, redirected })
        },
    )
}

/// Any answer that tells the truth about its bytes, or nothing that makes sense.
#[test]
fn no_answer_gives_a_wrong_byte() {
    let blob: Arc<[u8]> = contents(2, SIZE as u64).to_vec().into();
    let server = Server::start(Arc::clone(&blob));
    let (runtime, digest) = (Runtime::new().unwrap(), Digest::of(&blob));
    let (registry, s3) = (registry(server.address), s3(server.address));
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let good = std::cell::Cell::new(0);
    let check = |(asked, answer): (Range<u64>, Answer)| {
        server.says(&answer);
        for store in [&registry as &dyn BlobStore, &s3] {
            if let Ok(read) = runtime.block_on(store.read_range(&digest, asked.clone())) {
                let wanted = usize::try_from(asked.start).unwrap()..usize::try_from(asked.end).unwrap();
                prop_assert!(read[..] == blob[wanted], "other bytes for {:?} of {:?}", asked, answer);
                good.set(good.get() + 1);
            }
        }
        Ok(())
    };
    runner.run(&answers(), check).unwrap_or_else(|e| panic!("{e}"));
    assert!(good.get() > 10, "only {} answers were good ones", good.get());
}

/// Nobody listens: every client gives up after a bounded number of tries, with waits between them (Z09), and a store can
/// be made before its server is there (Z06).
#[test]
fn z06_z09_a_server_that_is_down_costs_a_bounded_number_of_tries() {
    use fs3_client::blob_store::metered::Metered;
    use fs3_client::blob_store::retry::Retry;
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let runtime = Runtime::new().unwrap();
    let policy = Policy { attempts: 4, ..QUICK };
    let digest = Digest::of(b"x");
    for store in [Box::new(registry(address)) as Box<dyn BlobStore>, Box::new(s3(address))] {
        let store: Arc<dyn BlobStore> = store.into();
        let metered = Metered::new(store);
        let meter = metered.reader();
        let whole = Retry::new(metered, policy);
        let reads = (0..1000u64).map(|chunk| whole.read_range(&digest, chunk << 18..(chunk + 1) << 18));
        let began = std::time::Instant::now();
        for read in runtime.block_on(futures::future::join_all(reads)) {
            assert!(read.unwrap_err().is_transient());
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
        let reads = meter.snapshot().reads;
        assert_eq!((reads.count, reads.failed), (4000, 4000), "four tries of each of 1,000 reads");
    }
    // It comes up at the same address, and the clients that were made before find it.
    let blob: Arc<[u8]> = contents(3, SIZE as u64).to_vec().into();
    let (registry, digest) = (registry(address), Digest::of(&blob));
    assert!(runtime.block_on(registry.read_range(&digest, 0..10)).unwrap_err().is_transient());
    let listener = TcpListener::bind(address).unwrap();
    let answer = Mutex::new(whole());
    let served = Arc::clone(&blob);
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(serve(&stream, &served, &answer))));
    assert!(runtime.block_on(registry.read_range(&digest, 5..50)).unwrap()[..] == blob[5..50]);
}
