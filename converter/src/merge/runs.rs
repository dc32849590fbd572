//! Which layers of an image become one.

use fs3_client::Digest;
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Up to what size consecutive layers become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Under {
    /// No layers are merged.
    Never,
    /// Runs of layers that have fewer than so many bytes together.
    Bytes(u64),
    /// All layers are merged.
    Always,
}

impl Default for Under {
    fn default() -> Self {
        Self::Bytes(3 << 30)
    }
}

/// A size that is none.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is neither `none`, `all`, nor a size such as 3GiB, 512MiB or 1000000")]
pub struct BadSize(String);

impl FromStr for Under {
    type Err = BadSize;

    fn from_str(text: &str) -> Result<Self, BadSize> {
        let bad = || BadSize(text.to_owned());
        match text {
            "none" => return Ok(Self::Never),
            "all" => return Ok(Self::Always),
            _ => {}
        }
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let shift = match unit {
            "" | "B" => 0,
            "K" | "KiB" => 10,
            "M" | "MiB" => 20,
            "G" | "GiB" => 30,
            "T" | "TiB" => 40,
            _ => return Err(bad()),
        };
        let number: u64 = number.parse().map_err(|_| bad())?;
        number.checked_mul(1 << shift).map(Self::Bytes).ok_or_else(bad)
    }
}

impl fmt::Display for Under {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.write_str("none"),
            Self::Always => f.write_str("all"),
            Self::Bytes(bytes) => {
                let unit = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
                let unit = unit.into_iter().find(|(shift, _)| *bytes > 0 && bytes % (1 << shift) == 0);
                match unit {
                    Some((shift, name)) => write!(f, "{}{name}", bytes >> shift),
                    None => write!(f, "{bytes}"),
                }
            }
        }
    }
}

/// What of a layer counts for its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weight {
    /// Bytes of its metadata image.
    pub metadata: u64,
    /// Its data blobs and their bytes.
    pub data: Vec<(Digest, u64)>,
}

/// Cuts an image's layers, bottom first, into runs that become one layer each; one of a single layer stays as it is.
///
/// From the bottom, each run takes as many layers as stay under the size together. A run's size is that of its metadata
/// images and of its data blobs, one that several of its layers refer to counted once. So images that share their lower
/// layers share the runs that lie wholly in these.
#[must_use]
pub fn runs(layers: &[Weight], under: Under) -> Vec<Range<usize>> {
    let limit = match under {
        Under::Never => 0,
        Under::Always => u64::MAX,
        Under::Bytes(bytes) => bytes,
    };
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut size = 0u64;
    let mut blobs: HashSet<Digest> = HashSet::new();
    for (index, layer) in layers.iter().enumerate() {
        let new = |blobs: &HashSet<Digest>| {
            let mut seen = HashSet::new();
            let data = layer.data.iter().filter(|(digest, _)| !blobs.contains(digest) && seen.insert(*digest));
            data.fold(layer.metadata, |sum, (_, size)| sum.saturating_add(*size))
        };
        let grown = size.saturating_add(new(&blobs));
        match runs.last_mut() {
            Some(run) if under == Under::Always || grown < limit => {
                run.end = index + 1;
                size = grown;
            }
            _ => {
                blobs.clear();
                size = new(&blobs);
                runs.push(index..index + 1);
            }
        }
        blobs.extend(layer.data.iter().map(|(digest, _)| *digest));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(metadata: u64, data: &[(u8, u64)]) -> Weight {
        Weight { metadata, data: data.iter().map(|(n, size)| (Digest::of(&[*n]), *size)).collect() }
    }

    #[test]
    fn runs_stay_under_the_size() {
        let layers = [weight(10, &[(1, 100)]), weight(10, &[(2, 30)]), weight(5, &[]), weight(1, &[(3, 200)])];
        assert_eq!(runs(&layers, Under::Never), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(runs(&layers, Under::Always), vec![0..4]);
        assert_eq!(runs(&layers, Under::Bytes(150)), [0..1, 1..3, 3..4]);
        assert_eq!(runs(&layers, Under::Bytes(151)), [0..2, 2..3, 3..4]);
        assert_eq!(runs(&layers, Under::Bytes(156)), [0..3, 3..4]);
        // A layer that is too large by itself stays alone.
        assert_eq!(runs(&layers, Under::Bytes(100)), [0..1, 1..3, 3..4]);
        assert!(runs(&[], Under::Always).is_empty());
    }

    #[test]
    fn a_blob_counts_once_in_a_run() {
        let layers = [weight(1, &[(1, 100)]), weight(1, &[(1, 100), (1, 100)]), weight(1, &[(1, 100)])];
        assert_eq!(runs(&layers, Under::Bytes(104)), vec![0..3]);
        assert_eq!(runs(&layers, Under::Bytes(103)), [0..2, 2..3]);
    }

    #[test]
    fn sizes_are_read_and_written() {
        for (text, under) in [
            ("none", Under::Never),
            ("all", Under::Always),
            ("3GiB", Under::Bytes(3 << 30)),
            ("512MiB", Under::Bytes(512 << 20)),
            ("7", Under::Bytes(7)),
            ("0", Under::Bytes(0)),
        ] {
            assert_eq!(text.parse::<Under>().unwrap(), under);
            assert_eq!(under.to_string(), text);
        }
        assert_eq!("2K".parse::<Under>().unwrap(), Under::Bytes(2048));
        for bad in ["", "GiB", "-1", "1.5GiB", "3GB", "20000000TiB", "99999999999999999999"] {
            assert!(bad.parse::<Under>().is_err(), "{bad}");
        }
    }
}
