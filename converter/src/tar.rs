//! A push parser for tar as image layers have it: V7, ustar, GNU, PAX and star archives, in buffers cut anywhere.
//!
//! The parser does no I/O and copies no file data: [`Event::Data`] lends slices of the caller's buffer, as long as the
//! buffer and the file allow. What it keeps (a header, an extended header, a sparse map) is bounded by [`Limits`].
//! It interprets no names: paths and link targets are the archive's bytes, `..`, leading and trailing slashes included.
//!
//! # Decisions
//!
//! Where archives are ambiguous, the question is what the container runtimes, which all read layers by Go's
//! `archive/tar`, make of them, and where Go refuses, what GNU tar makes of them.
//!
//! - **End.** Two zero blocks end the archive; all behind them is swallowed, another archive included. A single zero
//!   block before something else also ends it, with a warning (GNU tar, bsdtar, Python; Go refuses). An archive
//!   without end blocks, or without the last file's padding, is complete, with a warning.
//! - **Bodies.** Hard links, symlinks, devices, fifos and directories have none whatever their size field says (Go,
//!   Python; GNU tar for links), with a warning. `D` (GNU dumpdir) is a directory with a body that is skipped.
//! - **Types.** NUL is a directory if the name ends in a slash, else a regular file; so are `0` and `7`, even if the
//!   name ends in a slash (with a warning). Unknown typeflags are regular files with a warning (GNU tar). `V` labels
//!   are skipped with a warning; `M` (continued from another volume) is refused.
//! - **Precedence.** PAX records, then GNU `L`/`K` names, then the header. An `x` header replaces one before it for
//!   the same entry; `g` headers add up, and hold until replaced, but not for sizes, sparse maps and device numbers.
//!   An empty PAX value means that the header's field holds; an empty xattr value is an empty xattr.
//! - **Names** hold no NUL: fixed fields and long names end at the first, a PAX record with one is refused. The empty
//!   name is passed on.
//! - **Numbers** that a PAX record overrides are not looked at. Ids beyond `u32` and negative ones are refused, never
//!   replaced by names. Times that are no times (NUL-filled in Windows layers) are ignored with a warning.
//! - **ACLs** as text become `system.posix_acl_*`; if the archive has those too, they win. See the `acl` module for
//!   what cannot be converted: it is left out as a whole, with a warning.
//! - **Sparse maps** must be in order, inside the file, and account for exactly the bytes that the archive has.

use crate::entry::{Entry, EntryKind, EntrySink, Warning};

mod acl;
mod error;
mod extension;
mod header;
mod member;
mod numbers;
mod pax;
mod sparse;
#[cfg(test)]
mod tests;

pub use error::{Place, TarError};
use extension::Extension;
use header::{BLOCK, Header, padding};
use member::{Body, Extensions};
use pax::Records;
use sparse::Segment;

/// How much of an archive's own making the parser is willing to keep in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one PAX `x` header. Go stops at 1 MiB.
    pub pax_bytes: u64,
    /// Bytes of one PAX `g` header, and of all names and values that hold globally: every entry pays for these.
    pub pax_global_bytes: u64,
    /// Bytes of a GNU long name or long link target.
    pub long_name_bytes: u64,
    /// Segments of a sparse file.
    pub sparse_segments: usize,
    /// Warnings kept until [`Parser::take_warnings`]; further ones are only counted.
    pub warnings: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pax_bytes: 4 << 20,
            pax_global_bytes: 64 << 10,
            long_name_bytes: 1 << 20,
            sparse_segments: 1 << 20,
            warnings: 1000,
        }
    }
}

/// One step of an archive. For each entry: `Entry`, then `Data` if it is a regular file, then `EndEntry`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<'b> {
    /// A new entry begins.
    Entry(Entry),
    /// Data of the current regular file.
    Data {
        /// Where in the file `bytes` belong; rises, and jumps over holes.
        offset: u64,
        /// Never empty; part of the caller's buffer.
        bytes: &'b [u8],
    },
    /// The current entry is complete.
    EndEntry,
}

/// The parser; see the [module](self).
#[derive(Debug)]
pub struct Parser {
    limits: Limits,
    state: State,
    /// Bytes consumed so far.
    position: u64,
    /// To be skipped first: the rest of a body, then of its padding.
    skip_body: u64,
    skip_padding: u64,
    /// A block that came in pieces.
    block: [u8; BLOCK],
    filled: usize,
    /// The body of an extended header.
    extra: Vec<u8>,
    extensions: Extensions,
    global: Records,
    /// Whose body this is.
    place: Place,
    warnings: Vec<Warning>,
    warnings_dropped: u64,
}

#[derive(Debug)]
enum State {
    /// Between members.
    Header,
    /// After one zero block.
    Zero,
    /// In the body of an extended header of which `left` bytes are missing.
    Extension {
        kind: Extension,
        left: u64,
    },
    /// In the blocks of a sparse map.
    Map(Box<member::Member>),
    Data(Data),
    EndEntry,
    /// After the end of the archive.
    Done,
    Failed(TarError),
}

/// What is still to come of a file.
#[derive(Debug)]
struct Data {
    current: Segment,
    rest: std::vec::IntoIter<Segment>,
    padding: u64,
}

impl Parser {
    /// A parser at the start of an archive.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            state: State::Header,
            position: 0,
            skip_body: 0,
            skip_padding: 0,
            block: [0; BLOCK],
            filled: 0,
            extra: Vec::new(),
            extensions: Extensions::default(),
            global: Records::default(),
            place: Place::Header(0),
            warnings: Vec::new(),
            warnings_dropped: 0,
        }
    }

    /// The next event, consuming from the front of `input`; `None` if there is none without more input (`input` is
    /// then empty). After the end of the archive all input is consumed.
    ///
    /// # Errors
    /// The archive is refused, see [`TarError`]; every later call fails alike.
    pub fn next<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<Event<'b>>, TarError> {
        let result = self.advance(input);
        if let Err(error) = &result {
            self.state = State::Failed(error.clone());
            (self.skip_body, self.skip_padding) = (0, 0);
        }
        result
    }

    /// To be called when the input is over.
    ///
    /// # Errors
    /// [`TarError::Truncated`] if that was inside a member, or the error that [`Self::next`] gave before.
    pub fn finish(&mut self) -> Result<(), TarError> {
        let cut = |place| Err(TarError::Truncated { place });
        match &self.state {
            State::Failed(error) => return Err(error.clone()),
            State::Extension { .. } | State::Map(_) | State::Data(_) | State::EndEntry => {
                return cut(self.place.clone());
            }
            _ if self.skip_body > 0 => return cut(self.place.clone()),
            State::Header if self.block.iter().take(self.filled).any(|&byte| byte != 0) => {
                return cut(Place::Header(self.position - self.filled as u64));
            }
            State::Header => {
                if let Some(offset) = self.extensions.offset {
                    return cut(Place::Header(offset));
                }
                self.warn(b"", "the archive has no end-of-archive blocks: taken as complete");
            }
            State::Zero => self.warn(b"", "the archive ends in one zero block instead of two: taken as complete"),
            State::Done => {}
        }
        self.state = State::Done;
        Ok(())
    }

    /// The warnings since the last call.
    pub fn take_warnings(&mut self) -> Vec<Warning> {
        let mut warnings = std::mem::take(&mut self.warnings);
        if self.warnings_dropped > 0 {
            warnings.push(Warning::new(b"", format!("{} further warnings were dropped", self.warnings_dropped)));
            self.warnings_dropped = 0;
        }
        warnings
    }

    /// Bytes allocated for what is kept between calls, warnings excepted, roughly; bounded by the limits.
    pub(crate) fn held_bytes(&self) -> usize {
        let maps = match &self.state {
            State::Map(member) => match &member.body {
                Body::HeaderMap { map, .. } => map.map.held(),
                Body::TextMap { map, .. } => map.map.held(),
                _ => 0,
            },
            State::Data(data) => data.rest.len() * size_of::<Segment>(),
            _ => 0,
        };
        let name = |name: &Option<Vec<u8>>| name.as_ref().map_or(0, Vec::capacity);
        let records = self.extensions.records.as_ref().map_or(0, |records| records.held());
        let names = name(&self.extensions.long_name) + name(&self.extensions.long_link);
        maps + self.extra.capacity() + names + records + self.global.held()
    }

    fn advance<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<Event<'b>>, TarError> {
        loop {
            if !self.skip(input) {
                return Ok(None);
            }
            match &mut self.state {
                State::Data(data) => {
                    if let Some((offset, bytes)) = data.take(input) {
                        self.position += bytes.len() as u64;
                        return Ok(Some(Event::Data { offset, bytes }));
                    }
                    if data.current.length > 0 {
                        return Ok(None);
                    }
                    self.skip_padding = data.padding;
                    self.state = State::EndEntry;
                    return Ok(self.end_entry());
                }
                State::EndEntry => return Ok(self.end_entry()),
                State::Header | State::Zero => {
                    let Some(block) = self.take_block(input) else { return Ok(None) };
                    if let Some(event) = self.header(&block)? {
                        return Ok(Some(event));
                    }
                }
                State::Map(_) => {
                    let Some(block) = self.take_block(input) else { return Ok(None) };
                    if let Some(event) = self.map_block(&block)? {
                        return Ok(Some(event));
                    }
                }
                State::Extension { kind, left } => {
                    let kind = *kind;
                    let bytes = take(input, *left);
                    *left -= bytes.len() as u64;
                    self.position += bytes.len() as u64;
                    let complete = *left == 0;
                    self.extra.extend_from_slice(bytes);
                    if !complete {
                        return Ok(None);
                    }
                    self.state = State::Header;
                    self.extension(kind)?;
                }
                State::Done => {
                    self.position += input.len() as u64;
                    *input = &[];
                    return Ok(None);
                }
                State::Failed(error) => return Err(error.clone()),
            }
        }
    }

    fn end_entry<'b>(&mut self) -> Option<Event<'b>> {
        self.state = State::Header;
        Some(Event::EndEntry)
    }

    /// Skips what is to be skipped; false if more input is needed for that.
    fn skip(&mut self, input: &mut &[u8]) -> bool {
        for left in [&mut self.skip_body, &mut self.skip_padding] {
            let bytes = take(input, *left);
            *left -= bytes.len() as u64;
            self.position += bytes.len() as u64;
            if *left > 0 {
                return false;
            }
        }
        true
    }

    /// A whole block, once it is there.
    fn take_block(&mut self, input: &mut &[u8]) -> Option<[u8; BLOCK]> {
        let room = self.block.get_mut(self.filled..).unwrap_or_default();
        let bytes = take(input, room.len() as u64);
        room.get_mut(..bytes.len())?.copy_from_slice(bytes);
        self.filled += bytes.len();
        self.position += bytes.len() as u64;
        if self.filled < BLOCK {
            return None;
        }
        self.filled = 0;
        Some(self.block)
    }

    fn header<'b>(&mut self, block: &[u8; BLOCK]) -> Result<Option<Event<'b>>, TarError> {
        let at = self.position - BLOCK as u64;
        let zero = block.iter().all(|&byte| byte == 0);
        if matches!(self.state, State::Zero) {
            if !zero {
                self.warn(b"", format!("a lone zero block ends the archive: what follows at byte {at} was ignored"));
            }
            self.state = State::Done;
            return Ok(None);
        }
        if zero {
            if self.extensions.offset.is_some() {
                self.warn(b"", "an extended header before the end of the archive belongs to no entry");
                self.extensions = Extensions::default();
            }
            self.state = State::Zero;
            return Ok(None);
        }
        let Some(header) = Header::new(block) else {
            return Err(TarError::Checksum { place: Place::Header(at) });
        };
        let kind = match header.typeflag() {
            b'L' => Extension::LongName,
            b'K' => Extension::LongLink,
            b'x' | b'X' => Extension::Pax, // `X` is what Solaris wrote before the standard
            b'g' => Extension::PaxGlobal,
            b'V' => {
                self.skip_label(&header, at)?;
                return Ok(None);
            }
            _ => return self.member(&header),
        };
        self.begin_extension(kind, &header, at)?;
        Ok(None)
    }

    /// An entry's own header. Its event, unless the sparse map goes on in blocks of its own.
    fn member<'b>(&mut self, header: &Header) -> Result<Option<Event<'b>>, TarError> {
        let extensions = std::mem::take(&mut self.extensions);
        let mut member = member::build(header, extensions, &self.global, &self.limits)?;
        for note in std::mem::take(&mut member.notes) {
            self.warn(&member.entry.path, note);
        }
        self.place = Place::Entry(member.entry.path.clone());
        if let Body::TextMap { archived: 0, .. } = member.body {
            return Err(self.bad_map("there is no room for it in the body"));
        }
        if matches!(member.body, Body::HeaderMap { .. } | Body::TextMap { .. }) {
            self.state = State::Map(Box::new(member));
            return Ok(None);
        }
        Ok(Some(self.begin(member.entry, member.body)))
    }

    fn begin<'b>(&mut self, entry: Entry, body: Body) -> Event<'b> {
        let (segments, archived) = match body {
            Body::Segments { segments, archived } => (segments, archived),
            Body::Plain(size) => (Vec::new(), size),
            Body::Skipped(size) | Body::HeaderMap { archived: size, .. } | Body::TextMap { archived: size, .. } => {
                (self.skip_body, self.skip_padding) = (size, padding(size));
                self.state = State::EndEntry;
                return Event::Entry(entry);
            }
        };
        let whole = if segments.is_empty() { archived } else { 0 };
        let current = Segment { offset: 0, length: whole };
        self.state = State::Data(Data { current, rest: segments.into_iter(), padding: padding(archived) });
        Event::Entry(entry)
    }

    /// The next block of a sparse map.
    fn map_block<'b>(&mut self, block: &[u8; BLOCK]) -> Result<Option<Event<'b>>, TarError> {
        let State::Map(mut member) = std::mem::replace(&mut self.state, State::Header) else { return Ok(None) };
        let fail = |error| member::sparse_error(self.place.clone(), error, &self.limits);
        let (map, real_size, archived) = match member.body {
            Body::HeaderMap { mut map, archived } => {
                map.extend(block).map_err(fail)?;
                if map.extended {
                    member.body = Body::HeaderMap { map, archived };
                    self.state = State::Map(member);
                    return Ok(None);
                }
                (map.map, map.real_size, archived)
            }
            Body::TextMap { mut map, archived } => {
                let complete = map.block(block).map_err(fail)?;
                let archived = archived.checked_sub(BLOCK as u64);
                match archived {
                    Some(archived) if complete => (map.map, map.real_size, archived),
                    Some(archived) if archived > 0 => {
                        member.body = Body::TextMap { map, archived };
                        self.state = State::Map(member);
                        return Ok(None);
                    }
                    _ => return Err(self.bad_map("it does not fit into the body")),
                }
            }
            body => return Ok(Some(self.begin(member.entry, body))),
        };
        let segments = map.finish(real_size, archived).map_err(fail)?;
        let mut entry = member.entry;
        entry.kind = EntryKind::Regular { size: real_size, sparse: archived != real_size };
        Ok(Some(self.begin(entry, Body::Segments { segments, archived })))
    }

    fn bad_map(&self, reason: &str) -> TarError {
        TarError::Sparse { place: self.place.clone(), reason: reason.into() }
    }

    fn warn(&mut self, path: &[u8], message: impl Into<String>) {
        if self.warnings.len() < self.limits.warnings {
            self.warnings.push(Warning::new(path, message));
        } else {
            self.warnings_dropped += 1;
        }
    }
}

impl Data {
    /// The longest piece that both the file and `input` have; `None` if either is used up.
    fn take<'b>(&mut self, input: &mut &'b [u8]) -> Option<(u64, &'b [u8])> {
        while self.current.length == 0 {
            self.current = self.rest.next()?;
        }
        let bytes = take(input, self.current.length);
        if bytes.is_empty() {
            return None;
        }
        let offset = self.current.offset;
        self.current.offset += bytes.len() as u64;
        self.current.length -= bytes.len() as u64;
        Some((offset, bytes))
    }
}

/// Up to `count` bytes from the front of `input`.
fn take<'b>(input: &mut &'b [u8], count: u64) -> &'b [u8] {
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(input.len());
    let (taken, rest) = input.split_at(count);
    *input = rest;
    taken
}

/// What [`drive`] fails with.
#[derive(Debug, thiserror::Error)]
pub enum DriveError<E> {
    /// The archive is bad.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// The sink refused.
    #[error(transparent)]
    Sink(E),
}

/// Feeds all events of one buffer to `sink`; `input` is empty afterwards. The caller ends with [`Parser::finish`].
///
/// # Errors
/// The archive's fault, or the sink's.
pub fn drive<S: EntrySink>(parser: &mut Parser, input: &mut &[u8], sink: &mut S) -> Result<(), DriveError<S::Error>> {
    while let Some(event) = parser.next(input)? {
        match event {
            Event::Entry(entry) => sink.entry(entry),
            Event::Data { offset, bytes } => sink.data(offset, bytes),
            Event::EndEntry => sink.end_entry(),
        }
        .map_err(DriveError::Sink)?;
    }
    Ok(())
}
