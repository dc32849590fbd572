//! Threads that compress clusters; what goes in comes out in the same order.
//!
//! Memory is bounded: at most [`Pool::most`] clusters are on their way, and their buffers are used again.

use super::Codec;
use super::cluster::Compressor;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::collections::VecDeque;
use std::thread::JoinHandle;

/// A cluster on its way.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    /// Its plain bytes.
    pub(crate) input: Vec<u8>,
    /// Whether it may be compressed at all.
    pub(crate) compress: bool,
    /// Once it is done: whole blocks as they are stored.
    pub(crate) stored: Vec<u8>,
    /// BLAKE3 of those.
    pub(crate) digest: [u8; 32],
    /// Whether they are compressed.
    pub(crate) compressed: bool,
}

impl Piece {
    fn work(&mut self, compressor: &mut Compressor) {
        self.stored.clear();
        self.compressed = self.compress && compressor.store(&self.input, &mut self.stored);
        if !self.compress {
            self.stored.extend_from_slice(&self.input);
            self.stored.resize(self.input.len().next_multiple_of(crate::erofs::format::BLOCK_SIZE as usize), 0);
        }
        self.digest = *blake3::hash(&self.stored).as_bytes();
    }
}

/// Compressing threads, as many as there are cores.
#[derive(Debug)]
pub(crate) struct Pool {
    jobs: Option<Sender<(u64, Piece)>>,
    done: Receiver<(u64, Piece)>,
    threads: Vec<JoinHandle<()>>,
    /// What is on its way, in order; those that are done stay until those before them are.
    waiting: VecDeque<Option<Piece>>,
    /// Number of the first of `waiting`.
    first: u64,
    most: usize,
    free: Vec<Piece>,
}

impl Pool {
    /// # Panics
    /// When no thread can be started.
    pub(crate) fn new(codec: Codec) -> Self {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let most = 2 * count + 2;
        let (jobs, todo) = bounded::<(u64, Piece)>(most);
        let (out, done) = bounded(most);
        let threads = (0..count).map(|_| {
            let (todo, out) = (todo.clone(), out.clone());
            let work = move || {
                let mut compressor = Compressor::new(codec);
                while let Ok((number, mut piece)) = todo.recv() {
                    piece.work(&mut compressor);
                    if out.send((number, piece)).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name("compress".to_owned()).spawn(work).expect("a thread")
        });
        let threads = threads.collect();
        Self { jobs: Some(jobs), done, threads, waiting: VecDeque::new(), first: 0, most, free: Vec::new() }
    }

    /// An empty piece to fill and [`Pool::put`].
    pub(crate) fn piece(&mut self) -> Piece {
        let mut piece = self.free.pop().unwrap_or_default();
        piece.input.clear();
        piece
    }

    /// Gives a piece's memory back.
    pub(crate) fn recycle(&mut self, piece: Piece) {
        if self.free.len() < self.most {
            self.free.push(piece);
        }
    }

    /// Hands a piece to the threads. There must be room: see [`Pool::next`].
    pub(crate) fn put(&mut self, piece: Piece) {
        let number = self.first + self.waiting.len() as u64;
        self.waiting.push_back(None);
        let jobs = self.jobs.as_ref().expect("the threads take jobs until the pool is dropped");
        jobs.send((number, piece)).expect("a compressing thread panicked");
    }

    /// The next piece that is done, in the order in which they were put. Waits for it when the pool is full, or all are
    /// wanted; else there may be none now.
    pub(crate) fn next(&mut self, all: bool) -> Option<Piece> {
        loop {
            match self.waiting.front_mut() {
                None => return None,
                Some(front) => {
                    if let Some(piece) = front.take() {
                        self.waiting.pop_front();
                        self.first += 1;
                        return Some(piece);
                    }
                }
            }
            let (number, piece) = if all || self.waiting.len() >= self.most {
                self.done.recv().expect("a compressing thread panicked")
            } else {
                self.done.try_recv().ok()?
            };
            let place = usize::try_from(number - self.first).expect("fewer than are waiting");
            self.waiting[place] = Some(piece);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        drop(self.jobs.take());
        // Whoever is about to hand over a piece must not wait for someone to take it.
        while self.done.recv().is_ok() {}
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_in_order_and_few_are_on_their_way() {
        let mut pool = Pool::new(Codec::Lz4);
        let mut seen = 0u32;
        let mut take = |pool: &mut Pool, all| {
            while let Some(piece) = pool.next(all) {
                assert_eq!(piece.input[..4], seen.to_le_bytes());
                assert_eq!(piece.compressed, !seen.is_multiple_of(3));
                assert_eq!(piece.digest, *blake3::hash(&piece.stored).as_bytes());
                seen += 1;
                pool.recycle(piece);
            }
            seen
        };
        for number in 0..500u32 {
            let mut piece = pool.piece();
            piece.input.extend(number.to_le_bytes());
            // Of very different lengths, so that they are done out of order.
            piece.input.resize(if number % 7 == 0 { 190_000 } else { 8000 }, 1);
            piece.compress = !number.is_multiple_of(3);
            pool.put(piece);
            take(&mut pool, false);
            assert!(pool.waiting.len() < pool.most);
        }
        assert_eq!(take(&mut pool, true), 500);
    }

    #[test]
    fn a_pool_may_go_with_work_in_it() {
        let mut pool = Pool::new(Codec::Zstd { level: 1 });
        for _ in 0..pool.most {
            let mut piece = pool.piece();
            piece.input.resize(100_000, 1);
            piece.compress = true;
            pool.put(piece);
        }
        drop(pool);
    }
}
