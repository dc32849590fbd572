//! The collector's state and its list of condemned blobs, as bytes.

use crate::blob_store::Listed;
use crate::{Digest, blob_store::Stat};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

pub(super) const STATE: &str = "gc/state";
/// All that the protocol writes, leases excepted.
pub(super) const DIR: &str = "gc";
/// What writers have taken off lists. It stands in the objects' names.
pub(super) const RESCUED: &str = "gc/rescued";
/// Most blobs on a list: what stays well below the 16 MiB of an object, about 100 bytes each.
pub(super) const MOST: usize = 1 << 16;
const HEAD: &str = "dsec-condemned 1";

pub(super) fn list_name(generation: &str) -> String {
    format!("{DIR}/condemned-{generation}")
}

pub(super) fn rescued_name(generation: &str, digest: &Digest) -> String {
    format!("{RESCUED}/{generation}@{}", digest.hex())
}

/// How far a list has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// Nothing is deleted yet, and blobs can be rescued.
    Condemned,
    /// Deleting may have begun.
    Sweep,
}

/// What `gc/state` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    version: u32,
    pub(super) generation: String,
    pub(super) phase: Phase,
    /// The leases that have to end before the sweep; `None` until they were read.
    pub(super) waits_for: Option<Vec<String>>,
}

impl State {
    pub(super) const fn new(generation: String) -> Self {
        Self { version: 1, generation, phase: Phase::Condemned, waits_for: None }
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain strings and numbers always serialise")
    }

    /// # Errors
    /// A sentence. A state of a later version is one too: what it asks of us is not known.
    pub(super) fn from_json(bytes: &[u8]) -> Result<Self, String> {
        let state: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let sound = |name: &str| {
            (1..=200).contains(&name.len())
                && !name.starts_with('.')
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        match state.version {
            1 if sound(&state.generation) => Ok(state),
            1 => Err("its generation is not a name".to_owned()),
            version => Err(format!("it has version {version}, which this program does not know")),
        }
    }
}

/// Text: a head with the number of lines, then `<hex> <bytes> <seconds>.<nanoseconds>` for each blob.
pub(super) fn to_bytes(condemned: &[Listed]) -> Vec<u8> {
    let mut text = format!("{HEAD} {}\n", condemned.len());
    for blob in condemned {
        let time = blob.stat.modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        let (hex, size) = (blob.digest.hex(), blob.stat.size);
        let _ = writeln!(text, "{hex} {size} {}.{:09}", time.as_secs(), time.subsec_nanos());
    }
    text.into_bytes()
}

/// # Errors
/// A sentence.
pub(super) fn from_bytes(bytes: &[u8]) -> Result<Vec<Listed>, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not text")?;
    let mut lines = text.lines();
    let count = lines.next().and_then(|head| head.strip_prefix(HEAD)?.trim().parse::<usize>().ok());
    let blob = |(number, line): (usize, &str)| {
        parse_line(line).ok_or_else(|| format!("line {} does not name a blob", number + 2))
    };
    let condemned = lines.enumerate().map(blob).collect::<Result<Vec<Listed>, String>>()?;
    if count != Some(condemned.len()) {
        return Err("its head does not give the number of its lines".to_owned());
    }
    Ok(condemned)
}

fn parse_line(line: &str) -> Option<Listed> {
    let mut words = line.split(' ');
    let (hex, size, time) = (words.next()?, words.next()?, words.next()?);
    let (seconds, nanos) = time.split_once('.')?;
    let since = Duration::new(seconds.parse().ok()?, nanos.parse().ok().filter(|_| nanos.len() == 9)?);
    let modified = UNIX_EPOCH.checked_add(since)?;
    let digest = format!("sha256:{hex}").parse().ok()?;
    let stat = Stat { size: size.parse().ok()?, modified: Some(modified) };
    words.next().is_none().then_some(Listed { digest, stat })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lists_come_back(blobs in prop::collection::vec((any::<[u8; 4]>(), any::<u64>(), 0..1u64 << 40, 0..1_000_000_000u32), 0..20)) {
            let listed = |(seed, size, seconds, nanos): ([u8; 4], u64, u64, u32)| Listed {
                digest: Digest::of(&seed),
                stat: Stat { size, modified: Some(UNIX_EPOCH + Duration::new(seconds, nanos)) },
            };
            let blobs: Vec<Listed> = blobs.into_iter().map(listed).collect();
            prop_assert_eq!(from_bytes(&to_bytes(&blobs)), Ok(blobs));
        }

        #[test]
        fn any_bytes_are_a_list_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = (from_bytes(&bytes), State::from_json(&bytes));
        }

        #[test]
        fn a_list_that_was_cut_is_an_error(count in 1..5u64, cut in 1..40usize) {
            let stat = Stat { size: 1, modified: Some(UNIX_EPOCH) };
            let blobs: Vec<Listed> = (0..count).map(|n| Listed { digest: Digest::of(&n.to_le_bytes()), stat }).collect();
            let bytes = to_bytes(&blobs);
            // Without its last line feed, it is whole.
            prop_assert_eq!(from_bytes(&bytes[..bytes.len() - cut]).is_err(), cut > 1);
        }
    }

    #[test]
    fn states() {
        let mut state = State::new("boot-machine.1.2.gc".to_owned());
        state.waits_for = Some(vec!["x".to_owned()]);
        assert_eq!(State::from_json(&state.to_json()), Ok(state));
        for bad in [
            r#"{"version":2,"generation":"x","phase":"sweep","waits_for":null}"#,
            r#"{"version":1,"generation":"../x","phase":"sweep","waits_for":null}"#,
            r#"{"version":1,"generation":"","phase":"sweep","waits_for":null}"#,
            r#"{"version":1,"generation":"x","phase":"rest","waits_for":null}"#,
            "{}",
            "",
        ] {
            assert!(State::from_json(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
