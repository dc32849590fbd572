//! Image names as people write them: `name:tag`.
//!
//! The grammar is that of the distribution project's references (`reference/reference.go`), without digests:
//!
//! ```text
//! reference      := name [ ":" tag ]
//! name           := [ host "/" ] component { "/" component }          at most 255 bytes
//! host           := ( label { "." label } | "[" IPv6 "]" ) [ ":" digits ]
//! component      := alnum { ( "." | "_" | "__" | "-"... ) alnum }     lower case only
//! tag            := [A-Za-z0-9_] { [A-Za-z0-9_.-] }                   at most 128 bytes
//! ```

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest name, in bytes; it also keeps the name usable as one file name.
const NAME_MAX: usize = 255;
/// Longest tag, in bytes.
const TAG_MAX: usize = 128;
/// The tag of a reference that has none.
const DEFAULT_TAG: &str = "latest";

/// `name:tag`, both of them checked.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RefName {
    name: String,
    tag: String,
}

/// Why a string is not a reference to an image.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{text}` is not an image name: {why} (expected NAME:TAG, such as team/app:1.2)")]
pub struct RefNameError {
    /// What was given, cut at 200 characters.
    pub text: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl RefName {
    /// The part before the tag: `ghcr.io/team/app`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tag: `1.2`.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Where a store keeps it below `refs/`: the name with `+` for `/`, then the tag.
    ///
    /// One directory for a whole name, not one for each component: as nested directories the tag `b` of `a` would be
    /// the file `a/b`, and `a/b:c` would need a directory of that name. `+` occurs in no name, so nothing collides
    /// and the way back is unambiguous.
    pub(crate) fn store_path(&self) -> PathBuf {
        PathBuf::from(self.name.replace('/', "+")).join(&self.tag)
    }

    /// The reverse of [`RefName::store_path`]; `None` for names that it never makes.
    pub(crate) fn from_store_path(dir: &str, file: &str) -> Option<Self> {
        let name = dir.replace('+', "/");
        (!dir.contains('/') && check_name(&name).is_ok() && check_tag(file).is_ok())
            .then(|| Self { name, tag: file.to_owned() })
    }
}

impl fmt::Display for RefName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.tag)
    }
}

impl fmt::Debug for RefName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for RefName {
    type Err = RefNameError;

    /// `NAME` alone means `NAME:latest`.
    fn from_str(text: &str) -> Result<Self, RefNameError> {
        let fail = |why| RefNameError { text: text.chars().take(200).collect(), why };
        if text.contains('@') {
            return Err(fail("a digest (`@…`) cannot be part of it"));
        }
        // A colon belongs to the tag only behind the last slash: `host:5000/app` has a port and no tag.
        let last_component = text.rfind('/').map_or(0, |slash| slash + 1);
        let (name, tag) = match text[last_component..].find(':') {
            Some(colon) => (&text[..last_component + colon], &text[last_component + colon + 1..]),
            None => (text, DEFAULT_TAG),
        };
        check_name(name).map_err(fail)?;
        check_tag(tag).map_err(fail)?;
        Ok(Self { name: name.to_owned(), tag: tag.to_owned() })
    }
}

impl serde::Serialize for RefName {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("the name is empty");
    }
    if name.len() > NAME_MAX {
        return Err("the name is longer than 255 bytes");
    }
    let path = match name.split_once('/') {
        Some((first, rest)) if !is_component(first) => {
            if !is_host(first) {
                return Err("the part before the first `/` is neither a host nor a lower-case name");
            }
            rest
        }
        _ => name,
    };
    if !path.split('/').all(is_component) {
        return Err("a name has lower-case letters and digits, joined by `.`, `_`, `__`, `-` or `/`");
    }
    Ok(())
}

fn check_tag(tag: &str) -> Result<(), &'static str> {
    if tag.is_empty() {
        return Err("the tag is empty");
    }
    if tag.len() > TAG_MAX {
        return Err("the tag is longer than 128 bytes");
    }
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let mut bytes = tag.bytes();
    if bytes.next().is_some_and(word) && bytes.all(|b| word(b) || b == b'.' || b == b'-') {
        Ok(())
    } else {
        Err("a tag has letters, digits, `_`, `.` and `-`, and starts with none of the last two")
    }
}

/// `alnum { separator alnum }`, where a separator is one `.`, one or two `_`, or any number of `-`.
fn is_component(text: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    let edges = bytes.first().is_some_and(|b| alnum(*b)) && bytes.last().is_some_and(|b| alnum(*b));
    edges
        && bytes
            .split(|b| alnum(*b))
            .all(|separator| matches!(separator, b"" | b"." | b"_" | b"__") || separator.iter().all(|b| *b == b'-'))
}

fn is_host(text: &str) -> bool {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    if let Some(rest) = text.strip_prefix('[') {
        let Some((address, port)) = rest.split_once(']') else { return false };
        return !address.is_empty()
            && address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':')
            && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port));
    }
    let (labels, port) = match text.split_once(':') {
        Some((labels, port)) => (labels, Some(port)),
        None => (text, None),
    };
    port.is_none_or(is_port)
        && labels.split('.').all(|label| {
            let alnum = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
            let bytes = label.as_bytes();
            alnum(bytes.first()) && alnum(bytes.last()) && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<RefName, RefNameError> {
        text.parse()
    }

    #[test]
    fn names_that_are_fine() {
        for (text, name, tag) in [
            ("app", "app", "latest"),
            ("app:1.2", "app", "1.2"),
            ("a/b/c:x_Y-z.0", "a/b/c", "x_Y-z.0"),
            ("localhost:5000/app", "localhost:5000/app", "latest"),
            ("Reg.Example.com:5000/a__b/c--d.e:_t", "Reg.Example.com:5000/a__b/c--d.e", "_t"),
            ("[fe80::1]:5000/app:t", "[fe80::1]:5000/app", "t"),
            ("[::1]/app:t", "[::1]/app", "t"),
        ] {
            let parsed = parse(text).unwrap();
            assert_eq!((parsed.name(), parsed.tag()), (name, tag), "{text}");
        }
    }

    #[test]
    fn names_that_are_not() {
        for text in [
            "",
            ":",
            ":tag",
            "app:",
            "App",
            "app:.t",
            "app:-t",
            "app:t/",
            "/app",
            "app/",
            "a//b",
            "a/../b",
            "..",
            ".",
            "a/.",
            "a_-b",
            "a___b",
            "a..b",
            "-a",
            "a-",
            "a+b",
            "a b",
            "café",
            "app@sha256:00",
            "host:/app",
            "host:x/app",
            "-h/A",
            "[]/app",
            "[::1/app",
            "[::1]5/app",
            "a:b:c",
            "a\n",
            "a\0",
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains("expected NAME:TAG"), "{text}: {error}");
        }
        assert!(parse(&"a".repeat(255)).is_ok());
        assert_eq!(parse(&"a".repeat(256)).unwrap_err().why, "the name is longer than 255 bytes");
        assert!(parse(&format!("a:{}", "t".repeat(128))).is_ok());
        assert!(parse(&format!("a:{}", "t".repeat(129))).is_err());
    }

    #[test]
    fn tag_and_nested_name_do_not_collide() {
        let (tag, nested) = (parse("a:b").unwrap(), parse("a/b:c").unwrap());
        assert_eq!(tag.store_path(), PathBuf::from("a/b"));
        assert_eq!(nested.store_path(), PathBuf::from("a+b/c"));
        assert_eq!(RefName::from_store_path("a+b", "c"), Some(nested));
        for (dir, file) in [(".a", "c"), ("a", ".c.1"), ("A+", "c"), ("a/b", "c"), ("", "c"), ("a", "")] {
            assert_eq!(RefName::from_store_path(dir, file), None, "{dir} {file}");
        }
    }

    proptest! {
        #[test]
        fn any_string_is_parsed_or_refused(text in "\\PC{0,80}|[a-zA-Z0-9:./_@+-]{0,40}") {
            if let Ok(parsed) = parse(&text) {
                prop_assert_eq!(&parse(&parsed.to_string()).unwrap(), &parsed);
                prop_assert!(parsed.to_string().starts_with(&text));
                let path = parsed.store_path();
                let parts: Vec<&str> = path.to_str().unwrap().split('/').collect();
                prop_assert_eq!(parts.len(), 2);
                prop_assert!(parts.iter().all(|p| !p.starts_with('.') && p.len() <= 255));
                prop_assert_eq!(RefName::from_store_path(parts[0], parts[1]), Some(parsed));
            }
        }

        #[test]
        fn what_the_grammar_makes_is_accepted(
            host in "([a-z0-9]{1,5}(\\.[A-Z0-9]{1,4}(-[a-z]{1,3})?){0,2}(:[0-9]{1,5})?/)?",
            path in "[a-z0-9]{1,4}((\\.|_|__|-{1,3})[a-z0-9]{1,4}){0,2}(/[a-z0-9]{1,4}){0,3}",
            tag in "[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}",
        ) {
            let parsed = parse(&format!("{host}{path}:{tag}")).unwrap();
            prop_assert_eq!(parsed.name(), format!("{host}{path}"));
            prop_assert_eq!(parsed.tag(), tag);
        }
    }
}
