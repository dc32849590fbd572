//! What a client of S3 makes of what networks and gateways do.

use crate::support::{Place, QUICK};
use bytes::Bytes;
use fixtures::faulty_proxy::Fault;
use fs3_client::blob_store::retry::{Policy, Retry};
use fs3_client::blob_store::s3::{S3Blobs, S3Bucket};
use fs3_client::names::s3::S3Names;
use fs3_client::names::{Condition, NameStore as _, PutOutcome};
use fs3_client::testing::conformance::{self, Abilities, contents};
use fs3_client::{BlobError, BlobStore as _, Body, Digest};
use std::time::{Duration, Instant};

/// The suite through all faults that can be told; wrong bytes in an answer can only be told by digests (see `stores`).
#[tokio::test(flavor = "multi_thread")]
async fn the_suite_passes_through_a_bad_network() {
    let faults = vec![
        Fault::Reset,
        Fault::LoseAnswer,
        Fault::Status { status: 503, retry_after: None },
        Fault::Status { status: 429, retry_after: Some(0) },
        Fault::Status { status: 500, retry_after: None },
        Fault::ResetBody { after: 1000 },
        Fault::Truncate { after: 10 },
        Fault::ClaimWhole,
        Fault::WrongRequestBytes { at: 5 },
    ];
    let place = Place::new();
    let upstream = place.server.address();
    let proxy = fixtures::faulty_proxy::FaultyProxy::seeded(upstream, 11, 25, faults.clone());
    let settings = fixtures::s3::S3Server::environment(&proxy.url());
    let settings = || settings.iter().map(|(k, v)| (*k, v.as_str()));
    let bucket = S3Bucket::from_settings(settings(), "bucket", "x").unwrap();
    conformance::blobs(&Retry::new(S3Blobs::new(bucket.clone(), QUICK), QUICK), Abilities::default()).await;
    conformance::names(&Retry::new(S3Names::new(bucket, QUICK), QUICK), false).await;
    let log = proxy.log();
    for fault in faults {
        assert!(log.iter().any(|handled| handled.fault.as_ref() == Some(&fault)), "{fault:?} never happened");
    }
}

/// Nobody retries below the decorators: one call, one request.
#[tokio::test(flavor = "multi_thread")]
async fn each_fault_is_told_as_what_it_is() {
    let place = Place::new();
    let store = S3Blobs::new(place.bucket("x"), Policy::once());
    let bytes = contents(1, 100_000);
    let digest = Digest::of(&bytes);
    store.put(&digest, Body::Bytes(bytes.clone())).await.unwrap();
    for fault in [
        Fault::Reset,
        Fault::LoseAnswer,
        Fault::ResetBody { after: 5000 },
        Fault::Truncate { after: 5000 },
        Fault::Shorten { to: 5000 },
        Fault::ClaimWhole,
        Fault::Status { status: 503, retry_after: None },
    ] {
        let before = place.proxy.log().len();
        let told = fault.clone();
        place.proxy.set_script(move |_| Some(told.clone()));
        let error = store.read_range(&digest, 10..90_000).await.unwrap_err();
        assert!(error.is_transient(), "{fault:?}: {error}");
        assert_eq!(place.proxy.log().len(), before + 1, "{fault:?} was tried again");
    }
    place.proxy.set_script(|_| Some(Fault::Status { status: 429, retry_after: Some(7) }));
    match store.stat(&digest).await.unwrap_err() {
        BlobError::Transient { retry_after: Some(asked), .. } => assert_eq!(asked, Duration::from_secs(7)),
        other => panic!("{other}"),
    }
    place.proxy.set_script(|_| None);
    assert_eq!(store.read_range(&digest, 10..90_000).await.unwrap(), bytes.slice(10..90_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_after_is_waited_for() {
    let place = Place::new();
    let store = Retry::new(S3Blobs::new(place.bucket("x"), QUICK), QUICK);
    let asked = |request: &fixtures::faulty_proxy::Request| {
        (request.number == 0).then_some(Fault::Status { status: 503, retry_after: Some(1) })
    };
    place.proxy.set_script(asked);
    let began = Instant::now();
    assert!(matches!(store.stat(&Digest::of(b"x")).await, Err(BlobError::NotFound { .. })));
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
}

/// A part that fails is sent again alone, and an upload whose completion was not answered is found to be done.
#[tokio::test(flavor = "multi_thread")]
async fn large_uploads_resume_by_parts() {
    let place = Place::new();
    place.proxy.set_script(|request| {
        let part = request.target.contains("partNumber=2") && request.nth_of_target == 0;
        let complete = request.method == "POST" && request.target.contains("uploadId=") && request.nth_of_target == 0;
        match (part, complete) {
            (true, _) => Some(Fault::Reset),
            (_, true) => Some(Fault::LoseAnswer),
            _ => None,
        }
    });
    // No retries around it: the parts have their own.
    let store = S3Blobs::new(place.bucket("x"), QUICK);
    let bytes = contents(2, 30 << 20);
    let digest = Digest::of(&bytes);
    store.put(&digest, Body::Bytes(bytes.clone())).await.unwrap();
    let log = place.proxy.log();
    let puts = log.iter().filter(|h| h.request.method == "PUT").count();
    assert_eq!(puts, 4 + 1, "four parts, one of them twice");
    assert!(log.iter().any(|h| h.fault == Some(Fault::LoseAnswer)));
    assert_eq!(store.read_range(&digest, 0..30 << 20).await.unwrap(), bytes);
}

/// The answer to a conditional put is lost; the second attempt meets our own object and knows it.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_no_conflict() {
    let place = Place::new();
    let names = Retry::new(S3Names::new(place.bucket("x"), QUICK), QUICK);
    for (number, condition) in [Condition::Absent, Condition::Absent].into_iter().enumerate() {
        place
            .proxy
            .set_script(|request| (request.method == "PUT" && request.nth_of_target == 0).then_some(Fault::LoseAnswer));
        let name = format!("refs/a/{number}");
        let outcome = names.put(&name, Bytes::from_static(b"mine"), &condition).await.unwrap();
        let PutOutcome::Done(version) = outcome else { panic!("taken for somebody else's") };
        assert_eq!(names.get(&name).await.unwrap().unwrap().version, version);
        // And somebody else's is a conflict.
        let theirs = names.put(&name, Bytes::from_static(b"theirs"), &Condition::Absent).await.unwrap();
        assert_eq!(theirs, PutOutcome::Conflict);
    }
}

/// More than one page, with a page that fails in between.
#[tokio::test(flavor = "multi_thread")]
async fn lists_resume_at_the_page_that_failed() {
    use futures::TryStreamExt as _;
    let place = Place::new();
    let bucket = place.server.bucket("bucket").join("x/blobs/sha256");
    std::fs::create_dir_all(&bucket).unwrap();
    for n in 0..2500u32 {
        std::fs::write(bucket.join(Digest::of(&n.to_le_bytes()).hex()), "x").unwrap();
    }
    std::fs::write(bucket.join("README"), "no blob").unwrap();
    place.proxy.set_script(|request| (request.number % 2 == 1).then_some(Fault::Truncate { after: 2000 }));
    let store = S3Blobs::new(place.bucket("x"), QUICK);
    let all: Vec<_> = store.list().try_collect().await.unwrap();
    let mut digests: Vec<Digest> = all.iter().map(|listed| listed.digest).collect();
    digests.sort();
    digests.dedup();
    assert_eq!((all.len(), digests.len()), (2500, 2500), "each blob once");
    let log = place.proxy.log();
    assert!(log.iter().any(|h| h.fault.is_some()) && log.len() >= 4, "{} requests", log.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_say_what_is_wrong() {
    let place = Place::new();
    let open = |bucket: &str, settings: Vec<(&'static str, String)>| {
        S3Bucket::from_settings(settings.iter().map(|(k, v)| (*k, v.as_str())), bucket, "x").unwrap()
    };
    let none = S3Names::new(open("no-such-bucket", place.settings()), QUICK);
    let error = none.get("refs/a/b").await.unwrap_err();
    assert!(matches!(error, BlobError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("there is no such bucket"), "{error}");
    let mut settings = place.settings();
    settings.iter_mut().find(|(k, _)| *k == "AWS_SECRET_ACCESS_KEY").unwrap().1 = "wrong".to_owned();
    let error = S3Names::new(open("bucket", settings.clone()), QUICK).get("refs/a/b").await.unwrap_err();
    assert!(matches!(error, BlobError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("the secret key is wrong"), "{error}");
    settings.iter_mut().find(|(k, _)| *k == "AWS_ACCESS_KEY_ID").unwrap().1 = "nobody".to_owned();
    let error = S3Names::new(open("bucket", settings), QUICK).get("refs/a/b").await.unwrap_err();
    assert!(matches!(error, BlobError::Refused { .. }), "{error:?}");
    let nobody = open("bucket", fixtures::s3::S3Server::environment("http://127.0.0.1:1"));
    let error = S3Names::new(nobody, Policy::once()).get("refs/a/b").await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("refused"), "{error}");
}
