//! Where a store is, as people write it.

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a store is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StoreLocation {
    /// `PATH`: a directory. On a mounted 3FS it gets the rules of that.
    Dir(PathBuf),
    /// `3fs:PATH`: a directory with the rules of 3FS, whatever its mount says.
    Fs3(PathBuf),
    /// `s3://bucket/prefix`.
    S3 {
        /// The bucket.
        bucket: String,
        /// Without slashes at its ends; may be empty.
        prefix: String,
    },
}

/// Why a string is not a place for a store.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{text}` is not a store: {why}")]
pub struct LocationError {
    /// What was given, cut at 200 characters.
    pub text: String,
    /// What is wrong with it, and what would be right.
    pub why: &'static str,
}

impl StoreLocation {
    /// As [`FromStr`], for arguments: a path need not be UTF-8.
    ///
    /// # Errors
    /// [`LocationError`].
    pub fn from_os(text: &OsStr) -> Result<Self, LocationError> {
        match text.to_str() {
            Some(text) => text.parse(),
            None => Ok(Self::Dir(PathBuf::from(text))),
        }
    }
}

impl FromStr for StoreLocation {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let fail = |why| LocationError { text: text.chars().take(200).collect(), why };
        if text.is_empty() {
            return Err(fail("a path, 3fs:PATH or s3://BUCKET/PREFIX is needed"));
        }
        if let Some(path) = text.strip_prefix("3fs:") {
            return match path {
                "" => Err(fail("behind `3fs:` comes a path on the mounted file system")),
                path if path.starts_with("//") => Err(fail("3fs: takes a plain path, such as 3fs:/mnt/3fs/store")),
                path => Ok(Self::Fs3(path.into())),
            };
        }
        if let Some(rest) = text.strip_prefix("s3://") {
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            let bucket_bytes = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
            if !(3..=63).contains(&bucket.len()) || !bucket.bytes().all(bucket_bytes) {
                return Err(fail("a bucket has 3 to 63 letters, digits, dots and hyphens (s3://BUCKET/PREFIX)"));
            }
            let prefix = prefix.trim_end_matches('/');
            let good = |part: &str| {
                !matches!(part, "" | "." | "..")
                    && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._+-=@".contains(&b))
            };
            if !prefix.is_empty() && !prefix.split('/').all(good) {
                return Err(fail("a prefix has letters, digits and `._+-=@` between single slashes"));
            }
            if prefix.len() > 200 {
                return Err(fail("a prefix has at most 200 bytes"));
            }
            return Ok(Self::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() });
        }
        if text.starts_with("s3:") {
            return Err(fail("a bucket is written s3://BUCKET/PREFIX"));
        }
        let scheme = text.split_once("://").map(|(scheme, _)| scheme);
        if scheme.is_some_and(|scheme| !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric())) {
            return Err(fail(
                "stores are a path, 3fs:PATH or s3://BUCKET/PREFIX (a path with `://` in it: put ./ before)",
            ));
        }
        Ok(Self::Dir(text.into()))
    }
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(path) => write!(f, "{}", path.display()),
            Self::Fs3(path) => write!(f, "3fs:{}", path.display()),
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

impl From<PathBuf> for StoreLocation {
    fn from(path: PathBuf) -> Self {
        Self::Dir(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> StoreLocation {
        text.parse().unwrap()
    }

    #[test]
    fn three_kinds() {
        let s3 =
            |bucket: &str, prefix: &str| StoreLocation::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() };
        assert_eq!(parse("/srv/store"), StoreLocation::Dir("/srv/store".into()));
        assert_eq!(parse("./a:b"), StoreLocation::Dir("./a:b".into()));
        assert_eq!(parse("./x://y"), StoreLocation::Dir("./x://y".into()));
        assert_eq!(parse("3fs:/mnt/3fs/store"), StoreLocation::Fs3("/mnt/3fs/store".into()));
        assert_eq!(parse("s3://images"), s3("images", ""));
        assert_eq!(parse("s3://images/a/b/"), s3("images", "a/b"));
    }

    #[test]
    fn what_is_no_store_is_told_why() {
        for (text, why) in [
            ("", "is needed"),
            ("3fs:", "comes a path"),
            ("3fs://x/y", "plain path"),
            ("s3:bucket/x", "s3://BUCKET/PREFIX"),
            ("s3://", "3 to 63"),
            ("s3://a b/x", "3 to 63"),
            ("s3://bucket//x", "single slashes"),
            ("s3://bucket/../x", "single slashes"),
            ("s3://bucket/a?b", "single slashes"),
            ("docker://host/x", "put ./ before"),
            ("https://host/x", "put ./ before"),
        ] {
            let error = text.parse::<StoreLocation>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_what_was_parsed(text in "(3fs:|s3://)?[a-z0-9./:-]{0,20}") {
            if let Ok(location) = text.parse::<StoreLocation>() {
                prop_assert_eq!(location.to_string().parse::<StoreLocation>().unwrap(), location);
            }
        }
    }
}
