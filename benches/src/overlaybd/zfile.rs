//! Blocks of a ZFile, one at a time in random order, against the decompressor alone on the same bytes.

use super::{Numbers, ratio};
use crate::report::Metric;
use crate::sys::thread_cpu;
use anyhow::Result;
use std::hint::black_box;
use std::sync::Arc;
use ublk_overlaybd::backend::{Source, ZFile};
use ublk_overlaybd::format::checksum::raw_crc32c;
use ublk_overlaybd::format::zfile::{Algorithm, Decoder, Encoder, Geometry, HEAD_SIZE};

/// At most so many times what the decompressor alone takes.
const GOAL: f64 = 1.15;

pub(super) fn measure(data: &[u8], rounds: usize) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (algorithm, block_size, name) in [
        (Algorithm::Lz4, 4096, "zfile_lz4_4k"),
        (Algorithm::Lz4, 32768, "zfile_lz4_32k"),
        (Algorithm::Zstd, 4096, "zfile_zstd_4k"),
        (Algorithm::Zstd, 32768, "zfile_zstd_32k"),
    ] {
        let (bytes, geometry, starts) = zfile(data, block_size, algorithm)?;
        let file = ZFile::open(Arc::new(bytes.clone()), "bench")?;
        let bare = Geometry { verify: false, ..geometry };
        let mut numbers = Numbers(5);
        let blocks = data.len() / block_size as usize;
        let order: Vec<usize> = (0..blocks).map(|_| numbers.below(blocks)).collect();
        let mut plain = vec![0; block_size as usize];
        let (mut ours, mut theirs, mut checked) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let before = thread_cpu();
            for &block in &order {
                file.read_exact_at(&mut plain, block as u64 * u64::from(block_size))?;
                black_box(&plain);
            }
            ours.push((thread_cpu() - before).as_secs_f64());
            let mut decoder = Decoder::new();
            let before = thread_cpu();
            for &block in &order {
                decoder.decode(&bare, &bytes[starts[block]..starts[block + 1] - 4], &mut plain)?;
                black_box(&plain);
            }
            theirs.push((thread_cpu() - before).as_secs_f64());
            let before = thread_cpu();
            for &block in &order {
                decoder.decode(&geometry, &bytes[starts[block]..starts[block + 1]], &mut plain)?;
                black_box(&plain);
            }
            checked.push((thread_cpu() - before).as_secs_f64());
        }
        metrics.push(ratio(name, "the decompressor alone", &ours, &theirs).goal(GOAL));
        metrics.push(ratio(name, "the decompressor and the checksum", &ours, &checked));
    }
    Ok(metrics)
}

fn zfile(data: &[u8], block_size: u32, algorithm: Algorithm) -> Result<(Vec<u8>, Geometry, Vec<usize>)> {
    let mut bytes = vec![0; HEAD_SIZE];
    let (mut table, mut starts) = (Vec::new(), vec![HEAD_SIZE]);
    let mut encoder = Encoder::new(algorithm)?;
    for block in data.chunks(block_size as usize) {
        table.extend(encoder.encode(block, &mut bytes)?.to_le_bytes());
        starts.push(bytes.len());
    }
    let geometry = Geometry {
        index_offset: bytes.len() as u64,
        blocks: (table.len() / 4) as u64,
        original_size: data.len() as u64,
        block_size,
        algorithm,
        verify: true,
        first_block: HEAD_SIZE as u64,
        index_crc: Some(raw_crc32c(0, &table)),
        header_overwritten: true,
        digest: true,
    };
    let (header, trailer) = geometry.encode();
    bytes[..HEAD_SIZE].copy_from_slice(&header);
    bytes.extend(table);
    bytes.extend(trailer);
    Ok((bytes, geometry, starts))
}
