//! A source into a ZFile, by several threads: the same bytes whatever their number.

use super::{Progress, WriteError};
use crate::backend::Source;
use crate::format::checksum::raw_crc32c;
use crate::format::zfile::{Algorithm, Encoder, Geometry, HEAD_SIZE};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Bytes of the source that a thread compresses at a time, about.
const BATCH: u64 = 512 << 10;
/// Batches that a thread may be ahead of the writer.
const AHEAD: usize = 4;

/// A batch that was compressed: its blocks, and how long each is.
struct Batch {
    stored: Vec<u8>,
    lengths: Vec<u32>,
    plain: u64,
}

/// Compresses `source` into `file`, which messages call `path`, from byte `to` on; returns the length of the ZFile.
pub(super) fn compress(
    source: &dyn Source,
    file: &File,
    path: &Path,
    to: u64,
    options: (Algorithm, u32, usize),
    progress: &dyn Progress,
) -> Result<u64, WriteError> {
    let (algorithm, block_size, threads) = options;
    let size = source.size();
    let block = u64::from(block_size);
    let per_batch = (BATCH / block).max(1) * block;
    let batches = usize::try_from(size.div_ceil(per_batch)).unwrap_or(usize::MAX);
    let threads = threads.clamp(1, batches.max(1));
    let one = |encoder: &mut Encoder, plain: &mut Vec<u8>, number: usize| -> Result<Batch, WriteError> {
        let start = number as u64 * per_batch;
        let len = per_batch.min(size - start);
        plain.resize(usize::try_from(len).unwrap_or(0), 0);
        source.read_exact_at(plain, start)?;
        let (mut stored, mut lengths) = (Vec::with_capacity(plain.len()), Vec::new());
        for block in plain.chunks(block_size as usize) {
            lengths.push(encoder.encode(block, &mut stored).map_err(WriteError::io(path, "compress"))?);
        }
        Ok(Batch { stored, lengths, plain: len })
    };
    let mut table: Vec<u8> = Vec::new();
    let mut at = HEAD_SIZE as u64;
    let mut put = |batch: &Batch| -> Result<(), WriteError> {
        file.write_all_at(&batch.stored, to + at).map_err(WriteError::io(path, "write"))?;
        at += batch.stored.len() as u64;
        table.extend(batch.lengths.iter().flat_map(|length| length.to_le_bytes()));
        progress.done(batch.plain);
        Ok(())
    };
    let new_encoder = || Encoder::new(algorithm).map_err(WriteError::io(path, "compress"));
    std::thread::scope(|scope| {
        // Thread `t` has the batches t, t + threads, …, and a queue of its own: taken in turn they are in order.
        let mut queues = Vec::with_capacity(threads);
        for thread in 0..threads {
            let (sender, queue) = crossbeam_channel::bounded(AHEAD);
            queues.push(queue);
            let one = &one;
            scope.spawn(move || {
                let mut plain = Vec::new();
                let mut encoder = match new_encoder() {
                    Ok(encoder) => encoder,
                    Err(error) => {
                        let _ = sender.send(Err(error));
                        return;
                    }
                };
                for number in (thread..batches).step_by(threads) {
                    let batch = one(&mut encoder, &mut plain, number);
                    let failed = batch.is_err();
                    // The writer has gone when it met an error.
                    if sender.send(batch).is_err() || failed {
                        break;
                    }
                }
            });
        }
        for number in 0..batches {
            let lost = || WriteError::Asked("a thread that compresses has ended".to_owned());
            put(&queues[number % threads].recv().map_err(|_| lost())??)?;
        }
        Ok::<(), WriteError>(())
    })?;
    let geometry = Geometry {
        index_offset: at,
        blocks: size.div_ceil(block),
        original_size: size,
        block_size,
        algorithm,
        verify: true,
        first_block: HEAD_SIZE as u64,
        index_crc: Some(raw_crc32c(0, &table)),
        header_overwritten: true,
        digest: true,
    };
    let (header, trailer) = geometry.encode();
    table.extend(trailer);
    file.write_all_at(&table, to + at).map_err(WriteError::io(path, "write"))?;
    file.write_all_at(&header, to).map_err(WriteError::io(path, "write"))?;
    Ok(at + table.len() as u64)
}
