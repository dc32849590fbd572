//! PAX extended headers (POSIX.1-2001 `pax`, "Extended Header"): `length keyword=value\n` records that override
//! header fields of the next entry (`x`) or of all that follow (`g`).

use std::collections::BTreeMap;

use super::numbers;
use super::sparse::{Map, MapError};
use crate::entry::{Timestamp, Xattr, printable};

/// A value that an extended header may have set, or deleted by an empty one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Slot<T> {
    #[default]
    Unset,
    /// Neither an earlier record nor a global one holds: the header's field does.
    Deleted,
    Set(T),
}

impl<T> Slot<T> {
    /// The value that holds for an entry, `self` being its own header and `global` the one in force.
    pub(super) fn over<'a>(&'a self, global: &'a Self) -> Option<&'a T> {
        match (self, global) {
            (Self::Set(value), _) | (Self::Unset, Self::Set(value)) => Some(value),
            _ => None,
        }
    }

    fn replace_if_present(&mut self, newer: Self) {
        if !matches!(newer, Self::Unset) {
            *self = newer;
        }
    }
}

/// What an extended header says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Records {
    pub(super) path: Slot<Vec<u8>>,
    pub(super) link_path: Slot<Vec<u8>>,
    pub(super) size: Slot<u64>,
    pub(super) uid: Slot<u64>,
    pub(super) gid: Slot<u64>,
    pub(super) mtime: Slot<Timestamp>,
    pub(super) dev_major: Slot<u64>,
    pub(super) dev_minor: Slot<u64>,
    /// star's name for the logical size of a sparse file.
    pub(super) real_size: Slot<u64>,
    pub(super) acl_access: Slot<Vec<u8>>,
    pub(super) acl_default: Slot<Vec<u8>>,
    /// `SCHILY.xattr.*` by the rest of the keyword, not yet decoded.
    schily: BTreeMap<Vec<u8>, Vec<u8>>,
    /// `LIBARCHIVE.xattr.*` likewise; the values are decoded.
    libarchive: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) sparse: SparseRecords,
    /// Oddities to report with the entry.
    pub(super) notes: Vec<String>,
}

/// The `GNU.sparse.*` records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct SparseRecords {
    pub(super) name: Option<Vec<u8>>,
    /// `GNU.sparse.size` (0.x) or `.realsize` (1.0).
    pub(super) real_size: Option<u64>,
    major: Option<u64>,
    minor: Option<u64>,
    blocks: Option<u64>,
    /// Segments of 0.0 and 0.1, in order.
    map: Option<Map>,
    /// Numbers of `map` seen so far, and a 0.0 offset that waits for its length.
    count: u64,
    offset: Option<u64>,
}

/// Which sparse format the records make an entry.
#[derive(Debug)]
pub(super) enum SparseForm {
    /// 0.0 or 0.1: the map is in the records.
    Map(Map),
    /// 1.0: the map is in front of the data.
    Text,
}

/// Why an extended header is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RecordError {
    Bad(String),
    Map(MapError),
}

impl From<MapError> for RecordError {
    fn from(error: MapError) -> Self {
        Self::Map(error)
    }
}

fn bad<T>(reason: impl Into<String>) -> Result<T, RecordError> {
    Err(RecordError::Bad(reason.into()))
}

impl Records {
    /// Reads a whole extended header's body. On failure what was read so far stays, for the message's sake.
    pub(super) fn parse(&mut self, mut body: &[u8], max_segments: usize) -> Result<(), RecordError> {
        while !body.is_empty() {
            if body.iter().all(|&byte| byte == 0) {
                break; // filling that the writer counted in
            }
            let (record, rest) = split_record(body)?;
            self.record(record.keyword, record.value, max_segments)?;
            body = rest;
        }
        Ok(())
    }

    fn record(&mut self, keyword: &[u8], value: &[u8], max_segments: usize) -> Result<(), RecordError> {
        if let Some(name) = keyword.strip_prefix(b"SCHILY.xattr.") {
            self.schily.insert(name.to_vec(), value.to_vec());
            return Ok(());
        }
        if let Some(name) = keyword.strip_prefix(b"LIBARCHIVE.xattr.") {
            match numbers::base64_decode(value) {
                Some(value) => drop(self.libarchive.insert(name.to_vec(), value)),
                None => self.note(format!("{} is not base64 and was ignored", printable(keyword))),
            }
            return Ok(());
        }
        if let Some(keyword) = keyword.strip_prefix(b"GNU.sparse.") {
            return self.sparse.record(keyword, value, max_segments);
        }
        match keyword {
            b"path" => self.path = text(keyword, value)?,
            b"linkpath" => self.link_path = text(keyword, value)?,
            b"size" => self.size = number(keyword, value)?,
            b"uid" => self.uid = number(keyword, value)?,
            b"gid" => self.gid = number(keyword, value)?,
            b"SCHILY.devmajor" => self.dev_major = number(keyword, value)?,
            b"SCHILY.devminor" => self.dev_minor = number(keyword, value)?,
            b"SCHILY.realsize" => self.real_size = number(keyword, value)?,
            b"SCHILY.acl.access" => self.acl_access = text(keyword, value)?,
            b"SCHILY.acl.default" => self.acl_default = text(keyword, value)?,
            b"mtime" | b"atime" | b"ctime" => self.time(keyword, value),
            b"hdrcharset" if !matches!(value, b"" | b"BINARY" | b"ISO-IR 10646 2000 UTF-8") => {
                self.note(format!("names in the character set \"{}\" were taken as bytes", printable(value)));
            }
            b"RHT.security.selinux" => self.note("its SELinux context was ignored"),
            b"GNU.volume.offset" => return bad("it continues a file of another volume"),
            _ => {} // comment, uname, gname, SCHILY.ino, LIBARCHIVE.creationtime, vendors' own: nothing a layer keeps
        }
        Ok(())
    }

    fn time(&mut self, keyword: &[u8], value: &[u8]) {
        let slot = match numbers::timestamp(value) {
            Some(time) => Slot::Set(time),
            None if value.is_empty() => Slot::Deleted,
            None => {
                let (keyword, value) = (printable(keyword), printable(value));
                return self.note(format!("PAX {keyword} \"{value}\" is no time and was ignored"));
            }
        };
        if keyword == b"mtime" {
            self.mtime = slot;
        }
    }

    fn note(&mut self, note: impl Into<String>) {
        // A header of thousands of bad records is told of once or twice.
        if self.notes.len() < 16 {
            self.notes.push(note.into());
        }
    }

    /// Lays a newer global header over this one. What concerns a single entry's bytes cannot be global: it is left
    /// out, as Go leaves out all of them.
    pub(super) fn merge_global(&mut self, newer: Self) {
        self.path.replace_if_present(newer.path);
        self.link_path.replace_if_present(newer.link_path);
        self.uid.replace_if_present(newer.uid);
        self.gid.replace_if_present(newer.gid);
        self.mtime.replace_if_present(newer.mtime);
        self.acl_access.replace_if_present(newer.acl_access);
        self.acl_default.replace_if_present(newer.acl_default);
        self.schily.extend(newer.schily);
        self.libarchive.extend(newer.libarchive);
        self.notes = newer.notes;
        let bytes = newer.size != Slot::Unset || newer.real_size != Slot::Unset;
        if bytes || newer.dev_major != Slot::Unset || newer.dev_minor != Slot::Unset || newer.sparse != <_>::default() {
            self.note("a size, sparse map or device number for all entries was ignored");
        }
    }

    /// Bytes of names and values in here.
    pub(super) fn weight(&self) -> usize {
        let slot = |slot: &Slot<Vec<u8>>| if let Slot::Set(value) = slot { value.len() } else { 0 };
        let map = |map: &BTreeMap<Vec<u8>, Vec<u8>>| -> usize { map.iter().map(|(k, v)| k.len() + v.len()).sum() };
        let slots = [&self.path, &self.link_path, &self.acl_access, &self.acl_default].map(slot);
        slots.iter().sum::<usize>() + map(&self.schily) + map(&self.libarchive)
    }

    /// Bytes this keeps allocated beyond itself, roughly.
    pub(super) fn held(&self) -> usize {
        self.weight() + self.sparse.map.as_ref().map_or(0, Map::held)
    }

    /// The xattrs of an entry with these records under the `global` ones, by name; and what was odd.
    ///
    /// GNU tar and libarchive escape `%` and `=` in the `SCHILY` keyword (Go escapes nothing, but no real name holds
    /// such an escape). libarchive also escapes all that isn't ASCII, and tells by a second record of the same name.
    pub(super) fn xattrs(&self, global: &Self, notes: &mut Vec<String>) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut xattrs = BTreeMap::new();
        let mut add = |name: Vec<u8>, value: &Vec<u8>, notes: &mut Vec<String>| {
            if name.is_empty() || name.contains(&0) {
                notes.push(format!("the xattr name \"{}\" is impossible and was ignored", printable(&name)));
            } else if xattrs.get(&name).is_some_and(|other| other != value) {
                notes
                    .push(format!("SCHILY and LIBARCHIVE values of xattr {} differ: SCHILY's taken", printable(&name)));
            } else {
                xattrs.insert(name, value.clone());
            }
        };
        let has = |name: &Vec<u8>| self.libarchive.contains_key(name) || global.libarchive.contains_key(name);
        for (name, value) in layered(&global.schily, &self.schily) {
            let decoded = if has(name) { numbers::percent_decode(name) } else { decode_schily(name) };
            add(decoded, value, notes);
        }
        for (name, value) in layered(&global.libarchive, &self.libarchive) {
            add(numbers::percent_decode(name), value, notes);
        }
        xattrs
    }
}

/// The upper map's entries and those of the lower that it hides none of.
fn layered<'a>(
    lower: &'a BTreeMap<Vec<u8>, Vec<u8>>,
    upper: &'a BTreeMap<Vec<u8>, Vec<u8>>,
) -> impl Iterator<Item = (&'a Vec<u8>, &'a Vec<u8>)> {
    lower.iter().filter(|(name, _)| !upper.contains_key(*name)).chain(upper)
}

/// The two escapes that GNU tar uses in xattr keywords.
fn decode_schily(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&byte, after)) = rest.split_first() {
        let (byte, after) = match after.split_at_checked(2) {
            Some((b"25", after)) if byte == b'%' => (b'%', after),
            Some((b"3D" | b"3d", after)) if byte == b'%' => (b'=', after),
            _ => (byte, after),
        };
        out.push(byte);
        rest = after;
    }
    out
}

/// Xattrs as an entry has them.
pub(super) fn into_list(xattrs: BTreeMap<Vec<u8>, Vec<u8>>) -> Vec<Xattr> {
    xattrs.into_iter().map(|(name, value)| Xattr { name, value }).collect()
}

/// A record as it stands in the header.
struct Record<'a> {
    keyword: &'a [u8],
    value: &'a [u8],
}

/// The first record, and what follows it.
fn split_record(body: &[u8]) -> Result<(Record<'_>, &[u8]), RecordError> {
    let digits = body.iter().take(20).take_while(|byte| byte.is_ascii_digit()).count();
    let length = body.get(..digits).and_then(numbers::decimal).and_then(|length| usize::try_from(length).ok());
    let (Some(length), Some(b' ')) = (length, body.get(digits)) else {
        return bad("a record does not begin with its length");
    };
    let Some((record, rest)) = body.split_at_checked(length) else {
        return bad(format!("a record of {length} bytes is longer than the header"));
    };
    let Some((b'\n', record)) = record.get(digits + 1..).and_then(<[u8]>::split_last) else {
        return bad(format!("a record of {length} bytes does not end in a newline"));
    };
    let Some(equals) = record.iter().position(|&byte| byte == b'=') else {
        return bad(format!("the record \"{}\" has no equals sign", printable(record)));
    };
    let (keyword, value) = record.split_at(equals);
    if keyword.is_empty() || keyword.contains(&0) {
        return bad(format!("\"{}\" is no keyword", printable(keyword)));
    }
    Ok((Record { keyword, value: value.get(1..).unwrap_or_default() }, rest))
}

fn text(keyword: &[u8], value: &[u8]) -> Result<Slot<Vec<u8>>, RecordError> {
    if value.contains(&0) {
        return bad(format!("{} \"{}\" holds a NUL", printable(keyword), printable(value)));
    }
    Ok(if value.is_empty() { Slot::Deleted } else { Slot::Set(value.to_vec()) })
}

fn number(keyword: &[u8], value: &[u8]) -> Result<Slot<u64>, RecordError> {
    if value.is_empty() {
        return Ok(Slot::Deleted);
    }
    match numbers::decimal(value) {
        Some(value) => Ok(Slot::Set(value)),
        None => bad(format!("{} \"{}\" is no number", printable(keyword), printable(value))),
    }
}

impl SparseRecords {
    fn record(&mut self, keyword: &[u8], value: &[u8], max_segments: usize) -> Result<(), RecordError> {
        let number = || match numbers::decimal(value) {
            Some(number) => Ok(number),
            None => bad(format!("GNU.sparse.{} \"{}\" is no number", printable(keyword), printable(value))),
        };
        match keyword {
            b"name" => {
                self.name = match text(b"GNU.sparse.name", value)? {
                    Slot::Set(name) => Some(name),
                    _ => None,
                };
            }
            b"size" | b"realsize" => self.real_size = Some(number()?),
            b"major" => self.major = Some(number()?),
            b"minor" => self.minor = Some(number()?),
            b"numblocks" => self.blocks = Some(number()?),
            b"offset" => {
                let twice = self.offset.replace(number()?).is_some();
                return if twice { bad("GNU.sparse.offset twice without a numbytes between") } else { Ok(()) };
            }
            b"numbytes" => {
                let Some(offset) = self.offset.take() else {
                    return bad("GNU.sparse.numbytes without a GNU.sparse.offset before it");
                };
                self.segment(offset, number()?, max_segments)?;
            }
            b"map" => {
                self.map = None;
                self.count = 0;
                self.map_record(value, max_segments)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// 0.1: `offset,length,offset,length…`
    fn map_record(&mut self, value: &[u8], max_segments: usize) -> Result<(), RecordError> {
        if value.is_empty() {
            return Ok(());
        }
        let mut offset = None;
        for text in value.split(|&byte| byte == b',') {
            let Some(number) = numbers::decimal(text) else {
                return bad(format!("\"{}\" in GNU.sparse.map is no number", printable(text)));
            };
            match offset.take() {
                None => offset = Some(number),
                Some(offset) => self.segment(offset, number, max_segments)?,
            }
        }
        if offset.is_some() { bad("GNU.sparse.map ends in an offset without a length") } else { Ok(()) }
    }

    fn segment(&mut self, offset: u64, length: u64, max_segments: usize) -> Result<(), RecordError> {
        self.count += 1;
        self.map.get_or_insert_with(|| Map::new(max_segments)).push(offset, length)?;
        Ok(())
    }

    /// Which form the records make, if any.
    pub(super) fn form(&mut self, max_segments: usize) -> Result<Option<SparseForm>, String> {
        if self.offset.is_some() {
            return Err("a GNU.sparse.offset lacks its GNU.sparse.numbytes".into());
        }
        match (self.major, self.minor) {
            (Some(1), Some(0)) => return Ok(Some(SparseForm::Text)),
            (None, None) if self.map.is_none() && self.blocks.is_none() => return Ok(None),
            (None, None) | (Some(0), Some(0 | 1)) => {}
            (major, minor) => {
                let number = |part: Option<u64>| part.map_or("?".into(), |part| part.to_string());
                return Err(format!("its format {}.{} is not known", number(major), number(minor)));
            }
        }
        if let Some(blocks) = self.blocks.filter(|&blocks| blocks != self.count) {
            return Err(format!("it has {} segments where {blocks} are announced", self.count));
        }
        Ok(Some(SparseForm::Map(self.map.take().unwrap_or_else(|| Map::new(max_segments)))))
    }
}
