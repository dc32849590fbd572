//! The list of a batch: one image a line.
//!
//! ```text
//! # what is converted every night
//! oci:build/app:1.2                    team/app:1.2
//! "oci:a directory:latest"             team/other:1   # quoted, since it has a blank
//! {"source": "docker-archive:x.tar", "name": "team/x:3", "platform": "linux/arm64"}
//! ```
//!
//! Words stand between blanks. A word that begins with `"` ends with the next `"`; within it, `\"` and `\\` stand for
//! `"` and `\`. `#` at the beginning of a word begins a comment. A line that begins with `{` is one JSON object.

use crate::source::{Platform, SourceRef, TarInput};
use fs3_client::RefName;
use serde::Deserialize;
use std::collections::HashMap;

/// One image of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Its line, from 1.
    pub line: usize,
    /// Where it is.
    pub source: SourceRef,
    /// What it is to be called.
    pub name: RefName,
    /// Which of a multi-platform image, where the line says so.
    pub platform: Option<Platform>,
}

/// Why a list is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ListError {
    /// A line that is not understood.
    #[error("line {line}: {what}")]
    Line {
        /// From 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// Two images cannot have one name.
    #[error("lines {first} and {second} both are to become {name}")]
    SameName {
        /// The first line.
        first: usize,
        /// The other.
        second: usize,
        /// The name.
        name: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonLine {
    source: String,
    name: String,
    platform: Option<String>,
}

/// Reads a list.
///
/// # Errors
/// [`ListError`]: of the first line that is not understood, or of the first name that is there twice.
pub fn parse(text: &[u8]) -> Result<Vec<Item>, ListError> {
    let mut items = Vec::new();
    let mut names: HashMap<String, usize> = HashMap::new();
    for (number, bytes) in (1..).zip(text.split(|b| *b == b'\n')) {
        let fail = |what: String| ListError::Line { line: number, what };
        let line = std::str::from_utf8(bytes).map_err(|_| fail("it is not UTF-8".to_owned()))?;
        let Some(item) = parse_line(number, line.trim()).map_err(fail)? else { continue };
        let name = item.name.to_string();
        if let Some(first) = names.insert(name.clone(), number) {
            return Err(ListError::SameName { first, second: number, name });
        }
        items.push(item);
    }
    Ok(items)
}

fn parse_line(number: usize, line: &str) -> Result<Option<Item>, String> {
    let (source, name, platform) = if line.starts_with('{') {
        let JsonLine { source, name, platform } = serde_json::from_str(line).map_err(|e| e.to_string())?;
        (source, name, platform)
    } else {
        let mut words = words(line)?.into_iter();
        match (words.next(), words.next(), words.next()) {
            (None, ..) => return Ok(None),
            (Some(source), Some(name), None) => (source, name, None),
            (Some(_), None, _) => return Err("a source and a name are expected".to_owned()),
            (.., Some(third)) => return Err(format!("nothing is expected behind the name, and there is `{third}`")),
        }
    };
    let source: SourceRef = source.parse().map_err(|e| format!("{e}"))?;
    if source == SourceRef::Tar(TarInput::Stdin) {
        return Err("standard input cannot be an image of a batch".to_owned());
    }
    let name = name.parse().map_err(|e| format!("{e}"))?;
    let platform = platform.map(|text| text.parse().map_err(|e| format!("{e}"))).transpose()?;
    Ok(Some(Item { line: number, source, name, platform }))
}

fn words(line: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut rest = line.chars().peekable();
    loop {
        while rest.next_if(|c| c.is_whitespace()).is_some() {}
        match rest.peek() {
            None | Some('#') => return Ok(words),
            Some('"') => {
                rest.next();
                let mut word = String::new();
                loop {
                    match rest.next() {
                        Some('"') => break,
                        Some('\\') => match rest.next() {
                            Some(c @ ('"' | '\\')) => word.push(c),
                            _ => return Err("behind `\\` comes `\"` or `\\`".to_owned()),
                        },
                        Some(c) => word.push(c),
                        None => return Err("a quoted word does not end".to_owned()),
                    }
                }
                if rest.peek().is_some_and(|c| !c.is_whitespace()) {
                    return Err("a blank is expected behind a quoted word".to_owned());
                }
                words.push(word);
            }
            Some(_) => words.push(std::iter::from_fn(|| rest.next_if(|c| !c.is_whitespace())).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn said(text: &str) -> String {
        parse(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn lines() {
        let text = "# a comment\n\n  oci:a:1   team/app:1.2\t# another\r\n\"oci:a b#\\\"\\\\\" x\n\
                    {\"source\": \"tar:y z.tar\", \"name\": \"y:2\", \"platform\": \"linux/arm64\"}\noci:c#d e";
        let items = parse(text.as_bytes()).unwrap();
        let told: Vec<_> = items.iter().map(|i| (i.line, i.source.to_string(), i.name.to_string())).collect();
        let expected = [
            (3, "oci:a:1", "team/app:1.2"),
            (4, "oci:a b#\"\\", "x:latest"),
            (5, "tar:y z.tar", "y:2"),
            (6, "oci:c#d", "e:latest"),
        ];
        assert_eq!(told, expected.map(|(line, source, name)| (line, source.to_owned(), name.to_owned())));
        assert_eq!(items[2].platform, Some("linux/arm64".parse().unwrap()));
        assert_eq!(parse(b""), Ok(Vec::new()));
    }

    #[test]
    fn what_is_wrong_names_its_line() {
        for (text, expected) in [
            ("oci:a", "line 1: a source and a name are expected"),
            ("\noci:a b c", "line 2: nothing is expected behind the name, and there is `c`"),
            ("a b", "line 1: `a` names no transport"),
            ("oci:a B", "line 1: "),
            ("tar:- a", "line 1: standard input"),
            ("\"oci:a b", "line 1: a quoted word does not end"),
            ("\"oci:a\"b c", "line 1: a blank is expected"),
            ("\"oci:\\a\" c", "line 1: behind `\\`"),
            ("{\"source\": \"oci:a\"}", "line 1: missing field `name`"),
            ("{\"source\": \"oci:a\", \"name\": \"b\", \"tag\": 1}", "line 1: unknown field `tag`"),
            ("oci:a x\noci:b y\noci:c x:latest", "lines 1 and 3 both are to become x:latest"),
        ] {
            assert!(said(text).starts_with(expected), "{text}: {}", said(text));
        }
        assert_eq!(parse(b"oci:\xFF a").unwrap_err().to_string(), "line 1: it is not UTF-8");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_list_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn quoted_words_are_what_was_quoted(path in "[^\n\0]{1,20}") {
            prop_assume!(!path.contains(':') && path.trim() == path);
            let quoted = path.replace('\\', "\\\\").replace('"', "\\\"");
            let items = parse(format!("\"oci:{path_}\" name", path_ = quoted).as_bytes()).unwrap();
            prop_assert_eq!(&items[0].source, &SourceRef::Oci { dir: path.into(), tag: None });
        }
    }
}
