//! Tries again what may go better later: a bounded number of times, with waits that grow.

use super::{BlobError, BlobStore, Body, Listed, Stat};
use crate::Digest;
use crate::names::{Condition, ListedName, NameStore, Named, PutOutcome};
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How often, and with which waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Attempts in all, at least 1.
    pub attempts: u32,
    /// The wait after the first failure; it doubles with each. The wait itself is random between half of that and all.
    pub first_wait: Duration,
    /// No wait is longer, unless the backend asks for more (`Retry-After`).
    pub longest_wait: Duration,
    /// No wait begins that would end later than this after the first attempt.
    pub total: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            attempts: 8,
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_secs(10),
            total: Duration::from_secs(300),
        }
    }
}

impl Policy {
    /// A single attempt.
    #[must_use]
    pub const fn once() -> Self {
        Self { attempts: 1, first_wait: Duration::ZERO, longest_wait: Duration::ZERO, total: Duration::ZERO }
    }

    /// Calls `attempt` (with its number, from 0) until it succeeds, fails for good, or there is no time left.
    ///
    /// # Errors
    /// The last attempt's.
    pub async fn run<T, F, A>(&self, mut attempt: F) -> Result<T, BlobError>
    where
        F: FnMut(u32) -> A,
        A: Future<Output = Result<T, BlobError>>,
    {
        let began = Instant::now();
        let mut number = 0;
        loop {
            let error = match attempt(number).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            number += 1;
            match self.wait(number, began.elapsed(), &error) {
                Some(wait) => {
                    tracing::debug!("attempt {number} failed, the next is in {wait:?}: {error}");
                    tokio::time::sleep(wait).await;
                }
                None => return Err(error),
            }
        }
    }

    /// How long to wait after `failed` attempts in `elapsed` time, the last of them with `error`; `None` to give up.
    #[must_use]
    pub fn wait(&self, failed: u32, elapsed: Duration, error: &BlobError) -> Option<Duration> {
        if !error.is_transient() || failed >= self.attempts {
            return None;
        }
        let doubled = self.first_wait.saturating_mul(1 << (failed - 1).min(20)).min(self.longest_wait);
        let asked = match error {
            BlobError::Transient { retry_after: Some(asked), .. } => *asked,
            _ => Duration::ZERO,
        };
        let wait = (doubled / 2 + doubled.mul_f64(jitter()) / 2).max(asked);
        (elapsed + wait <= self.total).then_some(wait)
    }
}

/// A random number from 0 to 1: enough for waits.
fn jitter() -> f64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u8(0);
    f64::from(u32::try_from(hasher.finish() >> 32).unwrap_or(0)) / f64::from(u32::MAX)
}

/// A store whose transient failures are tried again.
#[derive(Debug)]
pub struct Retry<B> {
    inner: B,
    policy: Policy,
}

impl<B> Retry<B> {
    /// Wraps `inner`.
    pub const fn new(inner: B, policy: Policy) -> Self {
        Self { inner, policy }
    }
}

#[async_trait]
impl<B: BlobStore> BlobStore for Retry<B> {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        self.policy.run(|_| self.inner.stat(digest)).await
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        self.policy.run(|_| self.inner.read_range(digest, range.clone())).await
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        self.policy.run(|_| self.inner.put(digest, body.clone())).await
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        self.policy.run(|_| self.inner.delete(digest)).await
    }

    /// Tried again until it has begun. A list that breaks off later is the backend's to resume.
    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        begun(&self.policy, || self.inner.list())
    }
}

/// A list that is begun again until there is a first item, an end, or a failure for good.
fn begun<'s, T: Send + 's>(
    policy: &'s Policy,
    list: impl Fn() -> BoxStream<'s, Result<T, BlobError>> + Send + Sync + 's,
) -> BoxStream<'s, Result<T, BlobError>> {
    let first = async move {
        let attempt = policy.run(|_| async {
            let mut stream = list();
            match stream.next().await {
                Some(Ok(item)) => Ok(Some((item, stream))),
                Some(Err(error)) => Err(error),
                None => Ok(None),
            }
        });
        match attempt.await {
            Ok(Some((item, rest))) => futures::stream::once(async { Ok(item) }).chain(rest).boxed(),
            Ok(None) => futures::stream::empty().boxed(),
            Err(error) => futures::stream::once(async { Err(error) }).boxed(),
        }
    };
    futures::stream::once(first).flatten().boxed()
}

#[async_trait]
impl<N: NameStore> NameStore for Retry<N> {
    async fn get(&self, name: &str) -> Result<Option<Named>, BlobError> {
        self.policy.run(|_| self.inner.get(name)).await
    }

    /// An attempt whose answer was lost may have been the one that changed the object. So a conflict in a later attempt
    /// is looked at: when the object has just our bytes, it was us.
    async fn put(&self, name: &str, bytes: Bytes, condition: &Condition) -> Result<PutOutcome, BlobError> {
        let attempt = |number: u32| {
            let bytes = bytes.clone();
            async move {
                let outcome = self.inner.put(name, bytes.clone(), condition).await?;
                if number > 0 && outcome == PutOutcome::Conflict {
                    return Ok(match self.inner.get(name).await? {
                        Some(there) if there.bytes == bytes => PutOutcome::Done(there.version),
                        _ => PutOutcome::Conflict,
                    });
                }
                Ok(outcome)
            }
        };
        self.policy.run(attempt).await
    }

    async fn delete(&self, name: &str) -> Result<(), BlobError> {
        self.policy.run(|_| self.inner.delete(name)).await
    }

    fn list(&self, below: &str) -> BoxStream<'_, Result<ListedName, BlobError>> {
        let below = below.to_owned();
        begun(&self.policy, move || self.inner.list(&below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn failed(retry_after: Option<Duration>) -> BlobError {
        let what = "x".to_owned();
        BlobError::Transient { place: "here".to_owned(), op: "read", what, retry_after, source: "broken".into() }
    }

    const QUICK: Policy = Policy {
        attempts: 4,
        first_wait: Duration::from_millis(2),
        longest_wait: Duration::from_millis(5),
        total: Duration::from_secs(5),
    };

    #[tokio::test]
    async fn a_bounded_number_of_attempts() {
        let calls = AtomicU32::new(0);
        let outcome: Result<(), _> = QUICK
            .run(|number| {
                assert_eq!(number, calls.fetch_add(1, Ordering::Relaxed));
                async { Err(failed(None)) }
            })
            .await;
        assert!(outcome.unwrap_err().is_transient());
        assert_eq!(calls.load(Ordering::Relaxed), 4);
        let late = QUICK.run(|number| async move { if number < 2 { Err(failed(None)) } else { Ok(number) } }).await;
        assert_eq!(late.unwrap(), 2);
    }

    #[tokio::test]
    async fn what_is_final_is_not_tried_again() {
        let calls = AtomicU32::new(0);
        let outcome: Result<(), _> = QUICK
            .run(|_| {
                calls.fetch_add(1, Ordering::Relaxed);
                async { Err(BlobError::NotFound { what: "x".to_owned(), place: "here".to_owned() }) }
            })
            .await;
        assert!(matches!(outcome, Err(BlobError::NotFound { .. })));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn waits_grow_have_a_limit_and_heed_the_backend() {
        let policy = Policy::default();
        let wait = |failed_so_far, asked| policy.wait(failed_so_far, Duration::ZERO, &failed(asked));
        for failed_so_far in 1..8 {
            let most = Duration::from_millis(100 << (failed_so_far - 1)).min(policy.longest_wait);
            let wait = wait(failed_so_far, None).unwrap();
            assert!(wait >= most / 2 && wait <= most, "{failed_so_far}: {wait:?}");
        }
        assert_eq!(wait(8, None), None);
        assert_eq!(wait(1, Some(Duration::from_secs(30))), Some(Duration::from_secs(30)));
        assert_eq!(wait(1, Some(Duration::from_secs(301))), None, "longer than there is time for");
        assert_eq!(policy.wait(1, Duration::from_secs(300), &failed(None)), None);
    }
}
