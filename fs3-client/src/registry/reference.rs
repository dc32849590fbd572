//! Names of images in registries, as docker spells them.

use crate::Digest;
use std::fmt;
use std::str::FromStr;

/// What Docker Hub is called in references, and in the files with its credentials.
pub(super) const DOCKER_HUB: &str = "docker.io";
/// Where Docker Hub answers.
const DOCKER_HUB_API: &str = "registry-1.docker.io";

/// An image in a registry: host, repository, and which of its manifests.
///
/// `alpine` is `docker.io/library/alpine:latest`. Where there is a tag and a digest, the digest decides.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ImageRef {
    place: Place,
    which: Which,
}

/// Which manifest of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Which {
    /// By a name that may move.
    Tag(String),
    /// By its digest.
    Digest(Digest),
}

/// A repository: a registry's host, and a name in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    host: String,
    repository: String,
}

/// Why a string names no image.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{text}` is not an image in a registry: {why} (expected [HOST[:PORT]/]REPOSITORY[:TAG|@DIGEST])")]
pub struct ReferenceError {
    text: String,
    why: String,
}

impl ImageRef {
    /// Where it is.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Which manifest it is.
    #[must_use]
    pub fn which(&self) -> &Which {
        &self.which
    }
}

impl Place {
    pub(super) fn new(host: &str, repository: &str) -> Self {
        Self { host: host.to_owned(), repository: repository.to_owned() }
    }

    /// The registry's host, with a port where one is named; `docker.io` for Docker Hub.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The repository's name in the registry.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The host that answers requests.
    pub(super) fn api_host(&self) -> &str {
        if self.host == DOCKER_HUB { DOCKER_HUB_API } else { &self.host }
    }

    /// Whether the host is this machine.
    pub(super) fn is_loopback(&self) -> bool {
        let name = self.host.rsplit_once(':').map_or(self.host.as_str(), |(name, _)| name);
        name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl FromStr for ImageRef {
    type Err = ReferenceError;

    fn from_str(s: &str) -> Result<Self, ReferenceError> {
        let fail = |why: String| ReferenceError { text: printable(s, 300), why };
        let parsed: oci_client::Reference = s.parse().map_err(|e| fail(format!("{e}")))?;
        // The parser takes `UPPER/app` for a name on Docker Hub.
        if parsed.repository().bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(fail("a repository's name is lower case".to_owned()));
        }
        let which = match (parsed.digest(), parsed.tag()) {
            (Some(digest), _) => Which::Digest(digest.parse().map_err(|e: crate::DigestError| fail(e.to_string()))?),
            // The grammar's `\w` is ASCII; the parser's is not.
            (None, Some(tag)) if tag.is_ascii() => Which::Tag(tag.to_owned()),
            _ => return Err(fail("the tag may have letters, digits, `_`, `.` and `-`".to_owned())),
        };
        Ok(Self { place: Place::new(parsed.registry(), parsed.repository()), which })
    }
}

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.which {
            Which::Tag(tag) => write!(f, "{}:{tag}", self.place),
            Which::Digest(digest) => write!(f, "{}@{digest}", self.place),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.repository)
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => write!(f, "{digest}"),
        }
    }
}

/// At most `limit` characters of a text from outside, without control characters.
pub(super) fn printable(text: &str, limit: usize) -> String {
    let mut out: String =
        text.chars().take(limit).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
    if text.chars().nth(limit).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_names_are_docker_hubs() {
        for (text, whole, api) in [
            ("alpine", "docker.io/library/alpine:latest", "registry-1.docker.io"),
            ("team/app:1", "docker.io/team/app:1", "registry-1.docker.io"),
            ("docker.io/alpine", "docker.io/library/alpine:latest", "registry-1.docker.io"),
            ("index.docker.io/team/app", "docker.io/team/app:latest", "registry-1.docker.io"),
            ("localhost/app", "localhost/app:latest", "localhost"),
            ("localhost:5000/a/b:c", "localhost:5000/a/b:c", "localhost:5000"),
            ("quay.io/x", "quay.io/x:latest", "quay.io"),
        ] {
            let image: ImageRef = text.parse().unwrap();
            assert_eq!((image.to_string().as_str(), image.place().api_host()), (whole, api));
        }
    }

    #[test]
    fn digests_decide() {
        let digest = Digest::of(b"");
        for text in [format!("quay.io/a@{digest}"), format!("quay.io/a:1@{digest}")] {
            let image: ImageRef = text.parse().unwrap();
            assert_eq!(image.to_string(), format!("quay.io/a@{digest}"));
        }
    }

    #[test]
    fn what_is_no_reference_says_why() {
        let sha512 = format!("quay.io/a@sha512:{}", "0".repeat(128));
        for text in
            ["", "UPPER", "UPPER/app", "a:ä", "a b", "quay.io/a:", "quay.io/a@sha256:00", "../x", "a//b", &sha512]
        {
            let error = text.parse::<ImageRef>().unwrap_err().to_string();
            assert!(error.contains("is not an image in a registry"), "{error}");
        }
    }

    #[test]
    fn loopback_hosts() {
        for (host, loopback) in [
            ("localhost:1", true),
            ("localhost", true),
            ("127.0.0.1:5000", true),
            ("127.9.9.9", true),
            ("10.0.0.1", false),
            ("localhost.com", false),
        ] {
            assert_eq!(Place::new(host, "a").is_loopback(), loopback, "{host}");
        }
    }

    proptest! {
        #[test]
        fn any_text(text in "[a-z0-9./:@_A-Z-]{0,40}|.{0,20}") {
            if let Ok(image) = text.parse::<ImageRef>() {
                prop_assert_eq!(image.to_string().parse::<ImageRef>(), Ok(image));
            }
        }
    }
}
