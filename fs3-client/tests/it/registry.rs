//! A repository of a real registry as a place for blobs.

use bytes::Bytes;
use fixtures::faulty_proxy::{Fault, FaultyProxy, Request};
use fixtures::registry::{PASSWORD, Registry, TokenServer, USER};
use fs3_client::registry::{Client, ImageRef, Options, RegistryStore};
use fs3_client::{BlobError, BlobStore as _, Body, Digest};
use futures::StreamExt as _;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

fn store(address: SocketAddr) -> RegistryStore {
    let options = Options { plain_http: true, timeout: Duration::from_secs(5), ..Options::default() };
    let image: ImageRef = format!("{address}/team/blobs").parse().unwrap();
    RegistryStore::new(Client::new(options).unwrap().target(image.place()).unwrap())
}

fn sample(len: usize) -> Bytes {
    (0..len).map(|at| u8::try_from((at * 7 + at / 251) % 256).unwrap()).collect::<Vec<_>>().into()
}

fn is_get(request: &Request) -> bool {
    request.method == "GET"
}

#[test]
fn keeps_the_contract() {
    let registry = Registry::start();
    let store = store(registry.address());
    Runtime::new().unwrap().block_on(async {
        let bytes = sample(3_000_000);
        let digest = Digest::of(&bytes);
        assert!(matches!(store.stat(&digest).await, Err(BlobError::NotFound { .. })));
        assert!(matches!(store.read_range(&digest, 0..1).await, Err(BlobError::NotFound { .. })));
        store.put(&digest, Body::Bytes(bytes.clone())).await.unwrap();
        store.put(&digest, Body::Bytes(bytes.clone())).await.unwrap();
        assert_eq!(store.stat(&digest).await.unwrap().size, 3_000_000);
        for range in [0..3_000_000, 0..1, 2_999_999..3_000_000, 1_000_000..2_000_001, 5..5, 9_000_000..9_000_000] {
            let expected = if range.is_empty() { &[][..] } else { &bytes[range.start..range.end] };
            let found = store.read_range(&digest, range.start as u64..range.end as u64).await.unwrap();
            assert!(found == expected, "{range:?}");
        }
        for range in [0..3_000_001, 2_999_999..3_000_001, 3_000_000..3_000_001, 9_000_000..9_000_001] {
            let found = store.read_range(&digest, range.clone()).await;
            assert!(matches!(found, Err(BlobError::Corrupt { .. })), "{range:?}: {found:?}");
        }
        // From a file; several at once; nothing at all.
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes[1..]).unwrap();
        file.seek(SeekFrom::End(0)).unwrap();
        let file = Arc::new(file);
        let of_file = Digest::of(&bytes[1..]);
        let body = Body::File { file, len: 2_999_999 };
        let puts = futures::future::join_all((0..4).map(|_| store.put(&of_file, body.clone()))).await;
        assert!(puts.into_iter().all(|put| put.is_ok()));
        assert!(store.read_range(&of_file, 0..2_999_999).await.unwrap() == bytes[1..]);
        let empty = Digest::of(b"");
        store.put(&empty, Body::Bytes(Bytes::new())).await.unwrap();
        assert_eq!(store.stat(&empty).await.unwrap().size, 0);
        // Under a wrong name: nothing is there afterwards.
        let wrong = Digest::of(b"other");
        for bytes in [bytes.clone(), Bytes::new(), Bytes::from_static(b"one piece")] {
            let put = store.put(&wrong, Body::Bytes(bytes)).await;
            assert!(matches!(put, Err(BlobError::Corrupt { .. })), "{put:?}");
            assert!(matches!(store.stat(&wrong).await, Err(BlobError::NotFound { .. })));
        }
        store.delete(&digest).await.unwrap();
        store.delete(&digest).await.unwrap();
        assert!(matches!(store.stat(&digest).await, Err(BlobError::NotFound { .. })));
        assert!(matches!(store.list().next().await, Some(Err(BlobError::Unsupported { .. }))));
    });
}

/// The registry takes a token for two seconds only, whatever was said of it: who holds an older one is refused, asks for
/// another, and reads on.
#[test]
fn a_token_that_ends_is_renewed() {
    let server = TokenServer::start();
    let registry = Registry::with_tokens(&server);
    server.set_life(2);
    let options = Options {
        auth_file: Some(registry.auth_file(USER, PASSWORD)),
        timeout: Duration::from_secs(20),
        ..Options::default()
    };
    let image: ImageRef = registry.name("team/blobs").parse().unwrap();
    let store = RegistryStore::new(Client::new(options).unwrap().target(image.place()).unwrap());
    Runtime::new().unwrap().block_on(async {
        let bytes = sample(100_000);
        let digest = Digest::of(&bytes);
        store.put(&digest, Body::Bytes(bytes.clone())).await.unwrap();
        for _ in 0..2 {
            assert!(store.read_range(&digest, 5..90_000).await.unwrap() == bytes[5..90_000]);
            let asked = server.asked().len();
            tokio::time::sleep(Duration::from_millis(3500)).await;
            assert!(store.read_range(&digest, 5..90_000).await.unwrap() == bytes[5..90_000]);
            assert!(server.asked().len() > asked, "the old token was taken: {:?}", server.asked());
        }
    });
}

#[test]
fn right_bytes_or_an_error() {
    let registry = Registry::start();
    let proxy = FaultyProxy::honest(registry.address());
    let store = store(proxy.address());
    let bytes = sample(500_000);
    let digest = Digest::of(&bytes);
    Runtime::new().unwrap().block_on(async {
        store.put(&digest, Body::Bytes(bytes.clone())).await.unwrap();
        let read = || store.read_range(&digest, 200_000..300_000);
        // What a server without ranges sends is cut to what was asked for.
        proxy.set_script(|r| is_get(r).then_some(Fault::IgnoreRange));
        assert!(read().await.unwrap() == bytes[200_000..300_000]);
        let past = store.read_range(&digest, 400_000..500_001).await;
        assert!(matches!(past, Err(BlobError::Corrupt { .. })), "{past:?}");
        for fault in [
            Fault::Reset,
            Fault::LoseAnswer,
            Fault::ResetBody { after: 50_000 },
            Fault::Truncate { after: 50_000 },
            Fault::Shorten { to: 99_999 },
            Fault::Status { status: 429, retry_after: Some(7) },
            Fault::Status { status: 500, retry_after: None },
        ] {
            let told = fault.clone();
            proxy.set_script(move |r| is_get(r).then(|| told.clone()));
            let error = read().await.unwrap_err();
            assert!(error.is_transient(), "{fault:?}: {error}");
            if let Fault::Status { status: 429, .. } = fault {
                assert!(matches!(error, BlobError::Transient { retry_after: Some(wait), .. } if wait.as_secs() == 7));
            }
        }
        for (status, transient) in [(403, false), (404, false), (416, false), (501, false), (504, true)] {
            proxy.set_script(move |r| is_get(r).then_some(Fault::Status { status, retry_after: None }));
            let error = read().await.unwrap_err();
            assert_eq!(error.is_transient(), transient, "{status}: {error}");
        }
        proxy.set_script(|_| Some(Fault::Stall(Duration::from_secs(8))));
        let error = read().await.unwrap_err();
        assert!(matches!(error, BlobError::TimedOut { .. }), "{error}");
    });
}
