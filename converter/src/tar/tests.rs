//! The parser's cases, by their ids where they have one.

mod archive;
mod end;
mod metadata;
mod names;
mod pax;
mod properties;
mod sparse;

use super::*;
use archive::{Header, Record, Tar};

/// What an archive was read as.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    members: Vec<Member>,
    warnings: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct Member {
    entry: Entry,
    /// Adjacent pieces joined.
    data: Vec<(u64, Vec<u8>)>,
}

impl Member {
    fn path(&self) -> &[u8] {
        &self.entry.path
    }

    fn xattrs(&self) -> Vec<(&[u8], &[u8])> {
        self.entry.xattrs.iter().map(|xattr| (&xattr.name[..], &xattr.value[..])).collect()
    }

    fn kind(&self) -> &EntryKind {
        &self.entry.kind
    }

    /// The file with its holes as zeros.
    fn content(&self) -> Vec<u8> {
        let EntryKind::Regular { size, .. } = self.entry.kind else { panic!("{:?} is no file", self.entry) };
        let mut out = vec![0; usize::try_from(size).unwrap()];
        for (offset, bytes) in &self.data {
            let start = usize::try_from(*offset).unwrap();
            out[start..start + bytes.len()].copy_from_slice(bytes);
        }
        out
    }
}

impl Read {
    fn one(mut self) -> Member {
        assert_eq!(self.members.len(), 1, "{self:?}");
        self.members.remove(0)
    }

    fn paths(&self) -> Vec<String> {
        self.members.iter().map(|member| crate::entry::printable(member.path())).collect()
    }

    fn warned(&self, part: &str) {
        assert!(self.warnings.iter().any(|warning| warning.contains(part)), "no {part:?} in {:?}", self.warnings);
    }

    fn silent(self) -> Self {
        assert_eq!(self.warnings, [""; 0]);
        self
    }
}

/// Collects what [`drive`] says.
#[derive(Default)]
struct Sink(Vec<Member>);

impl EntrySink for Sink {
    type Error = std::convert::Infallible;

    fn entry(&mut self, entry: Entry) -> Result<(), Self::Error> {
        self.0.push(Member { entry, data: Vec::new() });
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        let data = &mut self.0.last_mut().unwrap().data;
        match data.last_mut() {
            Some((start, last)) if *start + last.len() as u64 == offset => last.extend_from_slice(bytes),
            _ => data.push((offset, bytes.to_vec())),
        }
        Ok(())
    }

    fn end_entry(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

fn read_cut(archive: &[u8], cut: usize) -> Result<Read, TarError> {
    let mut parser = Parser::new(Limits::default());
    let mut sink = Sink::default();
    for mut buffer in archive.chunks(cut) {
        drive(&mut parser, &mut buffer, &mut sink).map_err(|error| match error {
            DriveError::Tar(error) => error,
            DriveError::Sink(never) => match never {},
        })?;
    }
    parser.finish()?;
    let warnings = parser.take_warnings();
    let warnings = warnings.into_iter().map(|warning| format!("{}: {}", warning.entry, warning.message)).collect();
    Ok(Read { members: sink.0, warnings })
}

/// Reads an archive whole, byte by byte and in odd pieces, which must all give the same.
fn try_read(archive: &[u8]) -> Result<Read, TarError> {
    let whole = read_cut(archive, archive.len().max(1));
    for cut in [1, 7, 512, 1000] {
        assert_eq!(read_cut(archive, cut), whole, "in pieces of {cut}");
    }
    whole
}

fn read(archive: &[u8]) -> Read {
    try_read(archive).unwrap()
}

/// The sentence that an archive is refused with.
fn refusal(archive: &[u8]) -> String {
    try_read(archive).unwrap_err().to_string()
}
