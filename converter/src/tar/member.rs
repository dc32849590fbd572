//! A header, the long names and the PAX records before it: one entry, and what its body is.

use super::Limits;
use super::acl::Acl;
use super::error::{Place, TarError};
use super::header::{Field, Header};
use super::pax::{self, Records, Slot, SparseForm};
use super::sparse::{HeaderMap, Map, MapError, Segment, TextMap};
use crate::entry::{Entry, EntryKind};

/// What precedes a header and belongs to it.
#[derive(Debug, Default)]
pub(super) struct Extensions {
    /// GNU `L` and `K`.
    pub(super) long_name: Option<Vec<u8>>,
    pub(super) long_link: Option<Vec<u8>>,
    /// The `x` header.
    pub(super) records: Option<Box<Records>>,
    /// Where the first of these began.
    pub(super) offset: Option<u64>,
}

/// An entry and its body, before the body's first byte is seen.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) entry: Entry,
    pub(super) body: Body,
    /// Oddities to report.
    pub(super) notes: Vec<String>,
}

/// What the blocks after a header are.
#[derive(Debug)]
pub(super) enum Body {
    /// `size` bytes that are no file's data.
    Skipped(u64),
    /// A file without holes.
    Plain(u64),
    /// A file of these segments, `archived` bytes together.
    Segments { segments: Vec<Segment>, archived: u64 },
    /// An `S` header's map goes on in blocks of its own; then `archived` bytes.
    HeaderMap { map: HeaderMap, archived: u64 },
    /// A text map, then the data: `archived` bytes together.
    TextMap { map: TextMap, archived: u64 },
}

/// Makes an entry of a header that is neither an extension nor a label.
pub(super) fn build(
    header: &Header,
    extensions: Extensions,
    global: &Records,
    limits: &Limits,
) -> Result<Member, TarError> {
    let mut records = extensions.records.map_or_else(Records::default, |records| *records);
    let mut notes = std::mem::take(&mut records.notes);
    let path = path(header, extensions.long_name, &mut records, global, &mut notes);
    let builder = Builder { header, global, limits, place: Place::Entry(path.clone()) };
    let link = records.link_path.over(&global.link_path).cloned().or(extensions.long_link);
    let link = link.unwrap_or_else(|| header.link_name().to_vec());

    let (kind, body) = builder.kind(&mut records, &path, link, &mut notes)?;
    let mut entry = Entry {
        path,
        kind,
        mode: builder.mode()?,
        uid: builder.id(&records.uid, &global.uid, Field::Uid)?,
        gid: builder.id(&records.gid, &global.gid, Field::Gid)?,
        mtime: match records.mtime.over(&global.mtime) {
            Some(mtime) => *mtime,
            None => crate::entry::Timestamp { secs: builder.number(Field::Mtime)?, nanos: 0 },
        },
        xattrs: Vec::new(),
    };
    builder.xattrs(&records, &mut entry, &mut notes);
    Ok(Member { entry, body, notes })
}

/// PAX (its sparse name first) before GNU's long name before the header, as GNU tar has it.
fn path(
    header: &Header,
    long_name: Option<Vec<u8>>,
    records: &mut Records,
    global: &Records,
    notes: &mut Vec<String>,
) -> Vec<u8> {
    let pax = records.sparse.name.take().or_else(|| records.path.over(&global.path).cloned());
    match (pax, long_name) {
        (Some(pax), Some(long)) => {
            if pax != long {
                notes.push(format!(
                    "a GNU long name says \"{}\": the PAX name was taken",
                    crate::entry::printable(&long)
                ));
            }
            pax
        }
        (Some(name), None) | (None, Some(name)) => name,
        (None, None) => header.path(),
    }
}

struct Builder<'a> {
    header: &'a Header,
    global: &'a Records,
    limits: &'a Limits,
    place: Place,
}

impl Builder<'_> {
    fn bad_number(&self, field: &'static str, value: &[u8]) -> TarError {
        TarError::Number { place: self.place.clone(), field, value: value.to_vec() }
    }

    fn number(&self, field: Field) -> Result<i64, TarError> {
        self.header.number(field).map_err(|bytes| self.bad_number(field.name(), bytes))
    }

    fn unsigned(&self, field: Field) -> Result<u64, TarError> {
        u64::try_from(self.number(field)?).map_err(|_| self.bad_number(field.name(), self.header.bytes(field)))
    }

    /// The permission bits; some writers (Go's, old) add the file type to them.
    fn mode(&self) -> Result<u16, TarError> {
        let bits = self.number(Field::Mode)? & 0o7777;
        u16::try_from(bits).map_err(|_| self.bad_number("mode", self.header.bytes(Field::Mode)))
    }

    fn id(&self, own: &Slot<u64>, global: &Slot<u64>, field: Field) -> Result<u32, TarError> {
        let id = match own.over(global) {
            Some(&id) => id,
            None => self.unsigned(field)?,
        };
        u32::try_from(id).map_err(|_| self.bad_number(field.name(), id.to_string().as_bytes()))
    }

    fn device(&self, records: &Records) -> Result<(u64, u64), TarError> {
        let part = |own: &Slot<u64>, field| match own {
            Slot::Set(number) => Ok(*number),
            _ => self.unsigned(field),
        };
        Ok((part(&records.dev_major, Field::DevMajor)?, part(&records.dev_minor, Field::DevMinor)?))
    }

    fn size(&self, records: &Records) -> Result<u64, TarError> {
        match records.size {
            Slot::Set(size) => Ok(size),
            _ => self.unsigned(Field::Size),
        }
    }

    fn kind(
        &self,
        records: &mut Records,
        path: &[u8],
        link: Vec<u8>,
        notes: &mut Vec<String>,
    ) -> Result<(EntryKind, Body), TarError> {
        let typeflag = self.header.typeflag();
        let kind = match typeflag {
            b'1' => EntryKind::HardLink { target: link },
            b'2' => EntryKind::Symlink { target: link },
            b'3' => self.device(records).map(|(major, minor)| EntryKind::CharDevice { major, minor })?,
            b'4' => self.device(records).map(|(major, minor)| EntryKind::BlockDevice { major, minor })?,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            0 if path.ends_with(b"/") => EntryKind::Directory,
            b'D' => return Ok((EntryKind::Directory, Body::Skipped(self.size(records)?))),
            b'M' => return Err(self.unsupported("a file continued from another volume")),
            b'S' => return self.header_sparse(records),
            0 | b'0' | b'7' => return self.regular(records, path, notes),
            other => {
                let other = crate::entry::printable(&[other]);
                notes.push(format!("typeflag \"{other}\" is not known: taken as a regular file"));
                return self.regular(records, path, notes);
            }
        };
        // No body, whatever the size says: what GNU tar does for links, Go and Python for all of these. A size that
        // cannot be read is no matter then.
        if self.size(records).is_ok_and(|size| size != 0) {
            notes.push("its size was ignored: only regular files have data".into());
        }
        Ok((kind, Body::Plain(0)))
    }

    fn unsupported(&self, what: &'static str) -> TarError {
        TarError::Unsupported { place: self.place.clone(), what }
    }

    fn regular(
        &self,
        records: &mut Records,
        path: &[u8],
        notes: &mut Vec<String>,
    ) -> Result<(EntryKind, Body), TarError> {
        if path.ends_with(b"/") {
            notes.push("it is named like a directory but is a regular file by its type: taken as that".into());
        }
        let archived = self.size(records)?;
        let limit = self.limits.sparse_segments;
        let form = records.sparse.form(limit).map_err(|reason| self.sparse(MapError::Bad(reason)))?;
        let Some(form) = form else {
            return Ok((EntryKind::Regular { size: archived, sparse: false }, Body::Plain(archived)));
        };
        let Some(real_size) = records.sparse.real_size else {
            return Err(self.sparse(MapError::Bad("the file's real size is missing".into())));
        };
        match form {
            SparseForm::Map(map) => self.segments(map, real_size, archived),
            SparseForm::Text => {
                let map = TextMap::new(real_size, limit);
                Ok((EntryKind::Regular { size: real_size, sparse: true }, Body::TextMap { map, archived }))
            }
        }
    }

    fn header_sparse(&self, records: &Records) -> Result<(EntryKind, Body), TarError> {
        let archived = self.size(records)?;
        let mut map = HeaderMap::read(self.header, self.limits.sparse_segments).map_err(|error| self.sparse(error))?;
        if let Slot::Set(real_size) = records.real_size {
            map.real_size = real_size;
        }
        if map.extended {
            let kind = EntryKind::Regular { size: map.real_size, sparse: true };
            return Ok((kind, Body::HeaderMap { map, archived }));
        }
        self.segments(map.map, map.real_size, archived)
    }

    fn segments(&self, map: Map, real_size: u64, archived: u64) -> Result<(EntryKind, Body), TarError> {
        let segments = map.finish(real_size, archived).map_err(|error| self.sparse(error))?;
        let kind = EntryKind::Regular { size: real_size, sparse: archived != real_size };
        Ok((kind, Body::Segments { segments, archived }))
    }

    fn sparse(&self, error: MapError) -> TarError {
        sparse_error(self.place.clone(), error, self.limits)
    }

    fn xattrs(&self, records: &Records, entry: &mut Entry, notes: &mut Vec<String>) {
        let mut xattrs = records.xattrs(self.global, notes);
        let texts = [
            ("access", records.acl_access.over(&self.global.acl_access)),
            ("default", records.acl_default.over(&self.global.acl_default)),
        ];
        for (which, text) in texts {
            let name = format!("system.posix_acl_{which}").into_bytes();
            let Some(text) = text.filter(|_| !xattrs.contains_key(&name)) else { continue };
            let directory = entry.kind == EntryKind::Directory;
            let acl = match &entry.kind {
                // The link's target has the ACL, and the text is that of the target's own entry.
                EntryKind::HardLink { .. } => continue,
                EntryKind::Symlink { .. } => Err("symbolic links have none".into()),
                _ if which == "default" && !directory => Err("only directories have one".into()),
                _ => Acl::parse(text),
            };
            match acl {
                Ok(acl) if which == "access" && acl.is_mode() => {}
                Ok(acl) => {
                    if which == "access" {
                        // libarchive leaves the group's entry in the mode where Linux has the mask.
                        if (entry.mode ^ acl.mode()) & 0o707 != 0 {
                            notes.push("its mode disagrees with its ACL: the ACL's was taken".into());
                        }
                        entry.mode = entry.mode & 0o7000 | acl.mode();
                    }
                    xattrs.insert(name, acl.to_xattr());
                }
                Err(reason) => notes.push(format!("its {which} ACL was left out: {reason}")),
            }
        }
        entry.xattrs = pax::into_list(xattrs);
    }
}

/// A map's error, once it is known whose map it is.
pub(super) fn sparse_error(place: Place, error: MapError, limits: &Limits) -> TarError {
    match error {
        MapError::Bad(reason) => TarError::Sparse { place, reason },
        MapError::TooMany(found) => {
            TarError::Limit { place, what: "a number of sparse segments", found, limit: limits.sparse_segments as u64 }
        }
    }
}
