//! What a gzip file holds, from any place, by an index of places where inflating can begin.

use super::{ReadError, Source, check_range};
use crate::format::gzip_index::{GzipIndexError, HEADER_SIZE, Header, Point};
use std::sync::{Arc, Mutex, PoisonError};
use zlib_rs::{Inflate, InflateFlush, Status};

/// Stored bytes that are read at a time.
const INPUT: usize = 64 << 10;
/// How many places where reads ended are remembered: about 100 KiB each.
const CURSORS: usize = 4;

/// A gzip file of one member, read as what it holds.
#[derive(Debug)]
pub struct Gzip {
    stored: Arc<dyn Source>,
    index: Arc<dyn Source>,
    name: Arc<str>,
    header: Header,
    points: Vec<Point>,
    cursors: Mutex<Vec<Cursor>>,
}

/// Inflating, stopped somewhere.
struct Cursor {
    inflate: Inflate,
    /// The next byte that it gives.
    plain: u64,
    /// What was read and not inflated yet.
    input: Vec<u8>,
    used: usize,
    /// The next byte to read.
    stored: u64,
}

impl std::fmt::Debug for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cursor").field("plain", &self.plain).field("stored", &self.stored).finish_non_exhaustive()
    }
}

impl Gzip {
    /// Opens `stored`, which messages call `name`, by its index.
    ///
    /// # Errors
    /// The index is damaged, or of another file.
    pub fn open(stored: Arc<dyn Source>, index: Arc<dyn Source>, name: impl Into<Arc<str>>) -> Result<Self, ReadError> {
        let name = name.into();
        let corrupt =
            |error: GzipIndexError| ReadError::Corrupt { what: name.to_string(), offset: 0, why: error.to_string() };
        let mut head = [0; HEADER_SIZE];
        if index.size() < HEADER_SIZE as u64 {
            return Err(corrupt(GzipIndexError::Magic));
        }
        index.read_exact_at(&mut head, 0)?;
        let header = Header::parse(&head, index.size(), stored.size()).map_err(corrupt)?;
        // Not more than the index file has.
        let mut bytes = vec![0; usize::try_from(header.index_len).unwrap_or(usize::MAX)];
        index.read_exact_at(&mut bytes, header.index_start)?;
        let points = header.points(&bytes).map_err(corrupt)?;
        Ok(Self { stored, index, name, header, points, cursors: Mutex::new(Vec::new()) })
    }

    fn corrupt(&self, offset: u64, why: &str) -> ReadError {
        ReadError::Corrupt { what: self.name.to_string(), offset, why: why.to_owned() }
    }

    /// The nearest place at or before `offset`: where an earlier read ended, or one of the index.
    fn cursor(&self, offset: u64, wait: bool) -> Result<Option<Cursor>, ReadError> {
        let number = self.points.partition_point(|point| point.plain <= offset).saturating_sub(1);
        let point = self.points[number];
        {
            let mut cursors = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
            let near = |cursor: &Cursor| (point.plain..=offset).contains(&cursor.plain);
            let best = (0..cursors.len()).filter(|&i| near(&cursors[i])).max_by_key(|&i| cursors[i].plain);
            if let Some(best) = best {
                return Ok(Some(cursors.remove(best)));
            }
        }
        let mut window = vec![0; usize::try_from(point.window_len).unwrap_or(0)];
        let mut before = [0];
        if !get(&*self.index, &mut window, point.window, wait)?
            || (point.bits > 0 && !get(&*self.stored, &mut before, point.stored - 1, wait)?)
        {
            return Ok(None);
        }
        let window = self.header.window(&window).map_err(|error| self.corrupt(point.stored, &error.to_string()))?;
        let mut inflate = Inflate::new(false, 15);
        if !window.is_empty() && inflate.set_dictionary(&window).is_err() {
            return Err(self.corrupt(point.stored, "the window is not taken"));
        }
        let input = point.lead(before[0]);
        Ok(Some(Cursor { inflate, plain: point.plain, input, used: 0, stored: point.stored }))
    }

    /// Inflates the next bytes into all of `out`; `false` if that would have to wait.
    fn inflate(&self, cursor: &mut Cursor, out: &mut [u8], wait: bool) -> Result<bool, ReadError> {
        let mut done = 0;
        while done < out.len() {
            if cursor.used == cursor.input.len() {
                let left = self.stored.size() - cursor.stored;
                let mut more = vec![0; usize::try_from(left).unwrap_or(INPUT).min(INPUT)];
                if more.is_empty() {
                    return Err(self.corrupt(cursor.stored, "the gzip file ends early"));
                }
                if !get(&*self.stored, &mut more, cursor.stored, wait)? {
                    return Ok(false);
                }
                cursor.stored += more.len() as u64;
                (cursor.input, cursor.used) = (more, 0);
            }
            let (read, written) = (cursor.inflate.total_in(), cursor.inflate.total_out());
            let status =
                cursor.inflate.decompress(&cursor.input[cursor.used..], &mut out[done..], InflateFlush::NoFlush);
            let step = |before: u64, after: u64| usize::try_from(after - before).unwrap_or(0);
            let (read, written) = (step(read, cursor.inflate.total_in()), step(written, cursor.inflate.total_out()));
            cursor.used += read;
            cursor.plain += written as u64;
            done += written;
            match status {
                Ok(Status::StreamEnd) if done < out.len() => {
                    return Err(self.corrupt(cursor.stored, "the gzip stream ends before uncompress_file_size"));
                }
                Ok(_) if read == 0 && written == 0 && cursor.used < cursor.input.len() => {
                    return Err(self.corrupt(cursor.stored, "inflating does not go on"));
                }
                Ok(_) => {}
                Err(error) => return Err(self.corrupt(cursor.stored, &format!("does not inflate: {}", error.as_str()))),
            }
        }
        Ok(true)
    }

    fn read(&self, buf: &mut [u8], offset: u64, wait: bool) -> Result<bool, ReadError> {
        check_range(&self.name, self.header.plain_size, buf.len(), offset)?;
        if buf.is_empty() {
            return Ok(true);
        }
        let Some(mut cursor) = self.cursor(offset, wait)? else { return Ok(false) };
        let mut scratch = Vec::new();
        while cursor.plain < offset {
            scratch.resize(usize::try_from(offset - cursor.plain).unwrap_or(INPUT).min(INPUT), 0);
            if !self.inflate(&mut cursor, &mut scratch, wait)? {
                return Ok(false);
            }
        }
        if !self.inflate(&mut cursor, buf, wait)? {
            return Ok(false);
        }
        let mut cursors = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
        if cursors.len() == CURSORS {
            cursors.remove(0);
        }
        cursors.push(cursor);
        Ok(true)
    }
}

fn get(source: &dyn Source, buf: &mut [u8], offset: u64, wait: bool) -> Result<bool, ReadError> {
    if wait { source.read_exact_at(buf, offset).map(|()| true) } else { source.try_read_at(buf, offset) }
}

impl Source for Gzip {
    fn size(&self) -> u64 {
        self.header.plain_size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        self.read(buf, offset, true).map(drop)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        self.read(buf, offset, false)
    }
}
