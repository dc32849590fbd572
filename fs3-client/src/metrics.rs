//! The numbers of stores and of the chunk cache as Prometheus text, for daemons to serve under `/metrics`.
//!
//! Nothing is global: who has the cache and the stores hands them in. The cache's own names are defined in
//! `cache::metrics`, those of stores here.

mod times;

pub use times::Times;
#[cfg(feature = "cache")]
pub(crate) use times::{BUCKETS, bucket};

use crate::blob_store::metered::{Meter, Requests};
use std::fmt::Write as _;

/// The media type of what is rendered here: `Content-Type` of the answer.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A value for each kind of request, or for each kind of failure.
type Value = fn(&Requests) -> u64;

/// The numbers of requests: name, unit, what it counts, where it is.
const REQUESTS: [(&str, &str, &str, Value); 3] = [
    (
        "dsec_store_requests_total",
        "requests",
        "Requests to a store that ended, each attempt counted; lists that were begun.",
        |r| r.count,
    ),
    ("dsec_store_request_failures_total", "requests", "Of those, the ones that failed.", |r| r.failed),
    (
        "dsec_store_bytes_total",
        "bytes",
        "Bytes of blobs that moved in requests that did not fail; for lists, the number of items.",
        |r| r.bytes,
    ),
];
/// How long requests took, by kind.
const SECONDS: &str = "dsec_store_request_seconds";
/// Failures, by what went wrong.
const FAILURES: &str = "dsec_store_failures_total";

/// The names of stores' metrics, with the unit of each.
pub const STORE_NAMES: [(&str, &str); 5] = [
    (REQUESTS[0].0, REQUESTS[0].1),
    (REQUESTS[1].0, REQUESTS[1].1),
    (REQUESTS[2].0, REQUESTS[2].1),
    (SECONDS, "seconds"),
    (FAILURES, "requests"),
];

/// The counts of stores, each under a name of the caller's, which is the label `store`.
#[must_use]
pub fn stores(stores: &[(&str, &Meter)]) -> String {
    let mut text = String::with_capacity(4 << 10);
    // Writing to a string cannot fail.
    for (name, _, help, value) in REQUESTS {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for (labels, requests) in labelled(stores) {
            let _ = writeln!(text, "{name}{{{labels}}} {}", value(requests));
        }
    }
    let _ =
        writeln!(text, "# HELP {SECONDS} Time of a request to a store, an attempt each.\n# TYPE {SECONDS} histogram");
    // When a list is over is its reader's affair.
    for (labels, requests) in labelled(stores).filter(|(labels, _)| !labels.ends_with("op=\"list\"")) {
        requests.times.render(SECONDS, &labels, &mut text);
    }
    let _ = writeln!(text, "# HELP {FAILURES} Requests that failed, by what went wrong.\n# TYPE {FAILURES} counter");
    for (store, meter) in stores {
        for (kind, count) in &meter.failures {
            let _ = writeln!(text, "{FAILURES}{{store=\"{}\",kind=\"{kind}\"}} {count}", escaped(store));
        }
    }
    text
}

/// The numbers of a cache, and the counts of stores: all that one daemon has, in one text.
#[cfg(feature = "cache")]
#[must_use]
pub fn all(cache: &crate::cache::Metrics, meters: &[(&str, &Meter)]) -> String {
    cache.render() + &stores(meters)
}

/// All kinds of requests of all stores, with their labels.
fn labelled<'m>(stores: &'m [(&'m str, &'m Meter)]) -> impl Iterator<Item = (String, &'m Requests)> {
    stores.iter().flat_map(|(store, meter)| {
        let kinds = [
            ("stat", &meter.stats),
            ("read", &meter.reads),
            ("put", &meter.puts),
            ("delete", &meter.deletes),
            ("list", &meter.lists),
        ];
        let store = escaped(store);
        kinds.map(|(kind, requests)| (format!("store=\"{store}\",op=\"{kind}\""), requests))
    })
}

/// A label's value, as the format has it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn meter() -> Meter {
        let mut meter = Meter::default();
        meter.reads.count = 3;
        meter.reads.failed = 1;
        meter.reads.bytes = 4096;
        for micros in [900, 1500, 40_000_000] {
            meter.reads.times.note(Duration::from_micros(micros));
        }
        meter.failures.insert("timed out", 1);
        meter
    }

    #[test]
    fn each_family_is_there_once_and_each_store_has_its_lines() {
        let (first, second) = (meter(), Meter::default());
        let text = stores(&[("s3://a\"b", &first), ("mirror", &second)]);
        for line in [
            r#"dsec_store_requests_total{store="s3://a\"b",op="read"} 3"#,
            r#"dsec_store_requests_total{store="mirror",op="read"} 0"#,
            r#"dsec_store_request_failures_total{store="s3://a\"b",op="read"} 1"#,
            r#"dsec_store_bytes_total{store="s3://a\"b",op="read"} 4096"#,
            r#"dsec_store_request_seconds_bucket{store="s3://a\"b",op="read",le="0.001"} 1"#,
            r#"dsec_store_request_seconds_bucket{store="s3://a\"b",op="read",le="30"} 2"#,
            r#"dsec_store_request_seconds_bucket{store="s3://a\"b",op="read",le="+Inf"} 3"#,
            r#"dsec_store_request_seconds_sum{store="s3://a\"b",op="read"} 40.0024"#,
            r#"dsec_store_request_seconds_count{store="s3://a\"b",op="read"} 3"#,
            r#"dsec_store_failures_total{store="s3://a\"b",kind="timed out"} 1"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        for (name, _) in STORE_NAMES {
            let types = text.lines().filter(|line| line.starts_with(&format!("# TYPE {name} "))).count();
            assert_eq!(types, 1, "{name}");
        }
    }

    #[test]
    fn names_are_documented() {
        let documented = include_str!("../../docs/chunk-cache.md");
        for (name, unit) in STORE_NAMES {
            assert!(documented.contains(&format!("| `{name}` |")), "docs/chunk-cache.md does not have {name}");
            assert_eq!(name.ends_with("_seconds"), unit == "seconds", "{name}");
        }
    }
}
