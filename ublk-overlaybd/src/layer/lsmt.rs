//! A finished layer: header, data, index, trailer.

use super::{About, Form, Layer};
use crate::backend::{Joined, ReadError, Source, ZFile};
use crate::format::lsmt::{ENTRY_SIZE, Entry, HEADER_SIZE, Header, MAX_ENTRIES, SECTOR};
use crate::format::tar::Member;
use crate::index::{Extent, Index, Kind};
use std::sync::Arc;

/// Entries that are read at a time.
const BATCH: usize = 1 << 16;

/// Entries of an index in a file, read in batches.
pub(super) struct Entries<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) offset: u64,
    /// How many are left.
    pub(super) count: u64,
}

impl Entries<'_> {
    /// Calls `each` with the position and the bytes of every entry, until it gives an error.
    pub(super) fn try_each<E: From<ReadError>>(
        mut self,
        mut each: impl FnMut(u64, &[u8; ENTRY_SIZE]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut bytes = Vec::new();
        while self.count > 0 {
            let now = usize::try_from(self.count).unwrap_or(BATCH).min(BATCH);
            bytes.resize(now * ENTRY_SIZE, 0);
            self.source.read_exact_at(&mut bytes, self.offset)?;
            for entry in bytes.as_chunks().0 {
                each(self.offset, entry)?;
                self.offset += ENTRY_SIZE as u64;
            }
            self.count -= now as u64;
        }
        Ok(())
    }
}

pub(super) fn kind(entry: &Entry) -> Kind {
    if entry.zeroed { Kind::Zero } else { Kind::Data { layer: 0, moffset: entry.moffset } }
}

pub(super) fn outside(entry: &Entry, data_end: u64) -> String {
    let Entry { moffset, length, .. } = entry;
    format!("moffset {moffset} with length {length} is outside the data, which ends at {data_end}")
}

pub(super) fn header(source: &dyn Source, name: &str, offset: u64, place: &str) -> Result<Header, ReadError> {
    let corrupt = |why: String| ReadError::Corrupt { what: name.to_owned(), offset, why };
    if source.size().saturating_sub(offset) < HEADER_SIZE as u64 {
        return Err(corrupt(format!("{place}: {} bytes are too few for an LSMT file", source.size())));
    }
    let mut block = [0; HEADER_SIZE];
    source.read_exact_at(&mut block, offset)?;
    Header::parse(&block).map_err(|error| corrupt(format!("{place}: {error}")))
}

pub(super) fn open(
    name: Arc<str>,
    stored: Arc<dyn Source>,
    tar: Option<Member>,
    zfile: Option<Arc<ZFile>>,
    data: Arc<dyn Source>,
    target: Option<Arc<dyn Source>>,
) -> Result<Layer, ReadError> {
    let corrupt = |offset, why: String| ReadError::Corrupt { what: name.to_string(), offset, why };
    let header = header(&*data, &name, 0, "LSMT header")?;
    if !header.flags.is_header() || !header.flags.is_data() {
        let why = if header.flags.is_header() {
            "LSMT header: flags say that this is an index file, not a layer".to_owned()
        } else {
            format!("LSMT header: flags {:?} are not those of a header", header.flags)
        };
        return Err(corrupt(0, why));
    }
    let size = data.size();
    let trailer_at = size.checked_sub(HEADER_SIZE as u64).filter(|&at| at >= HEADER_SIZE as u64);
    let trailer = trailer_at.map(|at| self::header(&*data, &name, at, "LSMT trailer"));
    let (trailer_at, trailer) = match (trailer_at, trailer) {
        (Some(at), Some(Ok(trailer))) => (at, trailer),
        (_, Some(Err(error))) if !error.is_corrupt() || header.flags.is_sealed() => return Err(error),
        // What has no trailer and was never called sealed is a writable layer's data.
        _ if header.flags.is_sealed() => return Err(corrupt(0, "LSMT trailer: missing".to_owned())),
        _ => {
            let why = "LSMT trailer: none, so this is the data file of a writable layer, which is read with its index";
            return Err(corrupt(trailer_at.unwrap_or(0), why.to_owned()));
        }
    };
    let flags = trailer.flags;
    if flags.is_header() || !flags.is_data() || !flags.is_sealed() {
        return Err(corrupt(trailer_at, format!("LSMT trailer: flags {flags:?} are not those of a trailer")));
    }
    let (index_offset, count) = (trailer.index_offset, trailer.index_size);
    if index_offset < HEADER_SIZE as u64 || index_offset > trailer_at {
        return Err(corrupt(trailer_at, format!("LSMT trailer: index_offset {index_offset} is outside the file")));
    }
    if count > MAX_ENTRIES || count * ENTRY_SIZE as u64 > trailer_at - index_offset {
        let why = format!("LSMT trailer: index_size {count} is more than fit between index_offset and the trailer");
        return Err(corrupt(trailer_at, why));
    }

    let data_end = index_offset / SECTOR;
    let (mut padding, mut tags, mut last) = (0, (u8::MAX, 0), 0);
    let mut entries = Vec::new();
    let on_disk = Entries { source: &*data, offset: index_offset, count };
    on_disk.try_each(|at, bytes| {
        let wrong = |why: String| corrupt(at, format!("LSMT index: {why}"));
        let Some(entry) = Entry::parse(bytes).map_err(|error| wrong(error.to_string()))? else {
            padding += 1;
            return Ok(());
        };
        if entry.offset < last {
            return Err(wrong(format!("offset {} comes after a mapping that ends at {last}", entry.offset)));
        }
        // Of the others it is only known which they are when all tags have been seen.
        if target.is_none() && !entry.is_within(data_end) {
            return Err(wrong(outside(&entry, data_end)));
        }
        last = entry.end();
        tags = (entry.tag.min(tags.0), entry.tag.max(tags.1));
        entries.push(entry);
        Ok(())
    })?;
    let wrong = |why: String| corrupt(index_offset, format!("LSMT index: {why}"));
    let joined = target.map(|target| Arc::new(Joined::new(Arc::clone(&data), target)));
    let mut extents = Vec::with_capacity(entries.len());
    for entry in &entries {
        let mut kind = kind(entry);
        if let (Some(joined), Kind::Data { moffset, .. }) = (&joined, &mut kind) {
            // The lowest tag is that of the layer itself, since stacking adds to all of them.
            match entry.tag - tags.0 {
                0 if entry.is_within(data_end) => {}
                0 => return Err(wrong(outside(entry, data_end))),
                1 if *moffset + u64::from(entry.length) <= joined.target_end() / SECTOR => {
                    *moffset += joined.start() / SECTOR;
                }
                1 => {
                    let end = joined.target_end() / SECTOR;
                    let what = "is outside the file that it refers to, which ends at";
                    return Err(wrong(format!("moffset {moffset} with length {} {what} {end}", entry.length)));
                }
                other => return Err(wrong(format!("tag {other} above the lowest: 0 or 1 are known"))),
            }
        }
        extents.push(Extent { start: entry.offset, len: entry.length.into(), kind });
    }
    let entries = extents.len() as u64;
    let tagged = tags.1 > 0;
    let index = Index::from_sorted(extents).map_err(|error| wrong(error.to_string()))?;
    let data: Arc<dyn Source> = joined.map_or(data, |joined| joined);
    let form = if header.flags.is_sealed() { Form::Committed } else { Form::Sealed };
    let geometry = zfile.as_ref().map(|zfile| *zfile.geometry());
    let about = About {
        form,
        tar,
        zfile: geometry,
        header,
        trailer: Some(trailer),
        entries,
        padding,
        tagged,
        data_end,
        replayed: None,
    };
    Ok(Layer { name, data, index: Arc::new(index), about, stored, zfile })
}
