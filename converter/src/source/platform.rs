//! Platforms, and which image of an index serves one.

use std::fmt;
use std::str::FromStr;

/// `os/architecture[/variant]` in Go's names, as OCI has them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v8`, `v7`, …: a step of the architecture. `None` is the architecture's usual one.
    pub variant: Option<String>,
}

/// Why a string is no platform.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not a platform (expected os/architecture[/variant], such as linux/amd64)")]
pub struct PlatformError(String);

impl Platform {
    /// A platform with the usual aliases (`x86_64`, `aarch64`, …) replaced by OCI's names.
    #[must_use]
    pub fn new(os: &str, architecture: &str, variant: Option<&str>) -> Self {
        let variant = variant.filter(|v| !v.is_empty());
        let lower = architecture.to_ascii_lowercase();
        let (architecture, variant) = match lower.as_str() {
            "x86_64" | "x86-64" => ("amd64", variant),
            "aarch64" => ("arm64", variant),
            "armhf" => ("arm", Some("v7")),
            "armel" => ("arm", Some("v6")),
            "i386" | "i686" | "x86" => ("386", variant),
            "powerpc64le" => ("ppc64le", variant),
            "loongarch64" => ("loong64", variant),
            other => (other, variant),
        };
        // `8` and `v8` are both in use.
        let variant =
            variant.map(|v| if v.starts_with(|c: char| c.is_ascii_digit()) { format!("v{v}") } else { v.to_owned() });
        Self { os: os.to_ascii_lowercase(), architecture: architecture.to_owned(), variant }
    }

    /// What this machine runs.
    #[must_use]
    pub fn host() -> Self {
        let architecture = match (std::env::consts::ARCH, cfg!(target_endian = "little")) {
            ("powerpc64", true) => "ppc64le",
            ("powerpc64", false) => "ppc64",
            (other, _) => other,
        };
        Self::new("linux", architecture, None)
    }

    /// How well an image for `found` serves this platform, higher better; `None` if it does not.
    ///
    /// A variant serves those above it (an arm/v6 image runs on arm/v7), the nearest best; a variant that is not a
    /// number must be equal.
    #[must_use]
    pub fn rank(&self, found: &Self) -> Option<u32> {
        if self.os != found.os || self.architecture != found.architecture {
            return None;
        }
        let (asked, offered) = (self.step(), found.step());
        if asked == offered {
            return Some(u32::MAX);
        }
        let number = |v: &str| v.strip_prefix('v')?.parse::<u16>().ok();
        let (asked, offered) = (number(asked)?, number(offered)?);
        (offered < asked).then_some(u32::from(offered))
    }

    /// The variant, or what its absence means.
    fn step(&self) -> &str {
        match (self.variant.as_deref(), self.architecture.as_str()) {
            (Some(variant), _) => variant,
            (None, "amd64") => "v1",
            (None, "arm64") => "v8",
            (None, "arm") => "v7",
            (None, _) => "",
        }
    }

    /// Neither an operating system nor an architecture: what BuildKit writes on attestations.
    pub(super) fn is_unknown(&self) -> bool {
        self.os == "unknown" && self.architecture == "unknown"
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let variant = self.variant.as_ref().map(|v| format!("/{v}")).unwrap_or_default();
        f.write_str(&crate::entry::printable(format!("{}/{}{variant}", self.os, self.architecture).as_bytes()))
    }
}

impl FromStr for Platform {
    type Err = PlatformError;

    fn from_str(s: &str) -> Result<Self, PlatformError> {
        let parts: Vec<&str> = s.split('/').collect();
        let well_formed =
            parts.iter().all(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)));
        match parts[..] {
            [os, architecture] if well_formed => Ok(Self::new(os, architecture, None)),
            [os, architecture, variant] if well_formed => Ok(Self::new(os, architecture, Some(variant))),
            _ => Err(PlatformError(s.to_owned())),
        }
    }
}
