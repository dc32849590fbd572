//! SHA-256 digests as OCI writes them (`sha256:<64 hex>`), and hashing while streaming.

use sha2::Digest as _;
use std::fmt;
use std::str::FromStr;

/// A SHA-256 digest: the one name for content in the workspace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

/// Why a string is not a digest we can use.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DigestError {
    /// Not `algorithm:hex` at all.
    #[error("`{0}` is not a digest (expected sha256:<64 hex digits>)")]
    Malformed(String),
    /// A well-formed digest of an algorithm that this program does not compute.
    #[error("digest algorithm `{0}` is not supported (only sha256 is)")]
    Algorithm(String),
}

impl Digest {
    /// Wraps 32 raw bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }

    /// The raw 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// 64 lower-case hex digits, without the algorithm.
    #[must_use]
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// The first 12 hex digits, for people.
    #[must_use]
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    /// Accepts what OCI does: lower-case hex only (image-spec, descriptor.md, "Digests").
    fn from_str(s: &str) -> Result<Self, DigestError> {
        let malformed = || DigestError::Malformed(s.chars().take(200).collect());
        let (algorithm, hex_part) = s.split_once(':').ok_or_else(malformed)?;
        if algorithm.is_empty() || !algorithm.bytes().all(|b| b.is_ascii_alphanumeric() || b"+._-".contains(&b)) {
            return Err(malformed());
        }
        if algorithm != "sha256" {
            return Err(DigestError::Algorithm(algorithm.chars().take(64).collect()));
        }
        if hex_part.len() != 64 || !hex_part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(malformed());
        }
        let mut out = [0u8; 32];
        hex::decode_to_slice(hex_part, &mut out).map_err(|_| malformed())?;
        Ok(Self(out))
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let s = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        s.parse().map_err(serde::de::Error::custom)
    }
}

/// SHA-256 over a stream, counting its bytes.
#[derive(Clone, Default)]
pub struct Hasher {
    sha: sha2::Sha256,
    len: u64,
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hasher").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Hasher {
    /// Adds `bytes` to the stream.
    pub fn update(&mut self, bytes: &[u8]) {
        self.sha.update(bytes);
        self.len += bytes.len() as u64;
    }

    /// Bytes seen so far.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing was seen yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The digest of everything seen.
    #[must_use]
    pub fn finish(self) -> Digest {
        Digest(self.sha.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_and_print() {
        let d = Digest::of(b"");
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(d.to_string(), text);
        assert_eq!(text.parse::<Digest>().unwrap(), d);
        let json = serde_json::to_string(&d).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), d);
        let upper = text.to_uppercase().replace("SHA256", "sha256");
        for bad in ["", "sha256", "sha256:", ":00", "sha256:zz", upper.as_str(), "a b:00"] {
            assert!(matches!(bad.parse::<Digest>(), Err(DigestError::Malformed(_))), "{bad}");
        }
        assert_eq!("sha512:00".parse::<Digest>(), Err(DigestError::Algorithm("sha512".into())));
    }
}
