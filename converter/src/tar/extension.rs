//! Headers that are no entries: long names, PAX records and volume labels.

use super::error::{Place, TarError};
use super::header::{self, Field, Header, padding};
use super::member::{self, Extensions};
use super::pax::{RecordError, Records, Slot};
use super::{Parser, State};

/// What an extended header holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extension {
    /// GNU `L`.
    LongName,
    /// GNU `K`.
    LongLink,
    /// PAX `x`.
    Pax,
    /// PAX `g`.
    PaxGlobal,
}

impl Parser {
    /// The size field of a header that is not an entry's.
    fn own_size(header: &Header, at: u64) -> Result<u64, TarError> {
        header.number(Field::Size).ok().and_then(|size| u64::try_from(size).ok()).ok_or_else(|| TarError::Number {
            place: Place::Header(at),
            field: Field::Size.name(),
            value: header.bytes(Field::Size).to_vec(),
        })
    }

    pub(super) fn skip_label(&mut self, header: &Header, at: u64) -> Result<(), TarError> {
        let size = Self::own_size(header, at)?;
        self.place = Place::Header(at);
        (self.skip_body, self.skip_padding) = (size, padding(size));
        self.extensions = Extensions::default();
        self.warn(&header.path(), "a volume label was ignored");
        Ok(())
    }

    pub(super) fn begin_extension(&mut self, kind: Extension, header: &Header, at: u64) -> Result<(), TarError> {
        let (what, limit) = match kind {
            Extension::LongName => ("a GNU long name of bytes", self.limits.long_name_bytes),
            Extension::LongLink => ("a GNU long link name of bytes", self.limits.long_name_bytes),
            Extension::Pax => ("a PAX header of bytes", self.limits.pax_bytes),
            Extension::PaxGlobal => ("a global PAX header of bytes", self.limits.pax_global_bytes),
        };
        let size = Self::own_size(header, at)?;
        if size > limit {
            return Err(TarError::Limit { place: Place::Header(at), what, found: size, limit });
        }
        self.place = Place::Header(at);
        if kind != Extension::PaxGlobal {
            self.extensions.offset.get_or_insert(at);
        }
        self.state = State::Extension { kind, left: size };
        Ok(())
    }

    /// The extended header whose body is now in `extra`.
    pub(super) fn extension(&mut self, kind: Extension) -> Result<(), TarError> {
        self.skip_padding = padding(self.extra.len() as u64);
        let name = || header::until_nul(&self.extra).to_vec();
        match kind {
            Extension::LongName => self.extensions.long_name = Some(name()),
            Extension::LongLink => self.extensions.long_link = Some(name()),
            Extension::Pax | Extension::PaxGlobal => {
                let mut records = Records::default();
                let parsed = records.parse(&self.extra, self.limits.sparse_segments);
                if let Err(error) = parsed {
                    let place = match records.path {
                        Slot::Set(path) => Place::Entry(path),
                        _ => self.place.clone(),
                    };
                    return Err(match error {
                        RecordError::Bad(reason) => TarError::Pax { place, reason },
                        RecordError::Map(error) => member::sparse_error(place, error, &self.limits),
                    });
                }
                if kind == Extension::Pax {
                    self.extensions.records = Some(Box::new(records));
                } else {
                    self.merge_global(records)?;
                }
            }
        }
        // Large headers are rare: what one needed is not kept for the rest of the archive.
        self.extra.clear();
        self.extra.shrink_to(64 << 10);
        Ok(())
    }

    fn merge_global(&mut self, records: Records) -> Result<(), TarError> {
        self.global.merge_global(records);
        let (found, limit) = (self.global.weight() as u64, self.limits.pax_global_bytes);
        if found > limit {
            let what = "a sum of all global PAX records' bytes";
            return Err(TarError::Limit { place: self.place.clone(), what, found, limit });
        }
        for note in std::mem::take(&mut self.global.notes) {
            self.warn(b"", format!("global PAX header: {note}"));
        }
        Ok(())
    }
}
