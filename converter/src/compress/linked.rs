//! Compressed files of an image as files of another image.

use super::Algorithm;
use crate::erofs::format::BLOCK_SIZE;
use crate::erofs::read::{Data, Image, Inode, ReadError};
use crate::extent::{ClusterRun, Compressed, FileData, Runs};
use crate::read_at::ReadAt;

/// Most blocks of a plain cluster that is put together from blocks.
const PLAIN_BLOCKS: u32 = 256;

/// The clusters of a compressed file, left where they are. `number(device)` is what a device of `image` is called in the
/// image that the file will be in.
///
/// # Errors
/// What `number` fails with, and when the file is broken or in a form that our writer does not have.
pub(crate) fn linked<R: ReadAt, E: From<ReadError>>(
    image: &Image<R>,
    inode: &Inode,
    runs: &mut Runs,
    mut number: impl FnMut(u16) -> Result<u16, E>,
) -> Result<FileData, E> {
    let other = || ReadError::Unsupported { nid: inode.nid, what: "compressed data in a form that is not linked to" };
    let block_size = u64::from(BLOCK_SIZE);
    let first = runs.next_cluster();
    let mut algorithm = None;
    // To the kernel each block of a plain cluster is one of its own; put together, they are fewer entries.
    let mut plain: Option<ClusterRun> = None;
    for extent in image.chunks(inode) {
        let extent = extent?;
        let aligned =
            extent.file_offset % block_size == 0 && (extent.len % block_size == 0 || extent.end() == inode.size);
        let (device, block, blocks, compressed) = match extent.data {
            _ if !aligned => return Err(other().into()),
            Data::Compressed { device, block, blocks, algorithm: found } if device > 0 => {
                if algorithm.replace(found).is_some_and(|before| before != found) {
                    return Err(other().into());
                }
                (device, block, blocks, true)
            }
            Data::Block { device, block } if device > 0 && extent.len <= block_size => (device, block, 1, false),
            _ => return Err(other().into()),
        };
        let run = ClusterRun {
            repeat: 1,
            len: u32::try_from(extent.len).map_err(|_| other())?,
            block: u32::try_from(block).map_err(|_| other())?,
            blocks,
            device: number(device)?,
            compressed,
        };
        if let Some(last) = &mut plain
            && !compressed
            && last.device == run.device
            && last.blocks < PLAIN_BLOCKS
            && last.block.checked_add(last.blocks) == Some(run.block)
        {
            last.len += run.len;
            last.blocks += run.blocks;
            continue;
        }
        if let Some(last) = plain.take() {
            runs.push_cluster(first, last);
        }
        if compressed {
            runs.push_cluster(first, run);
        } else {
            plain = Some(run);
        }
    }
    if let Some(last) = plain {
        runs.push_cluster(first, last);
    }
    let count = runs.next_cluster() - first;
    // Without any compressed cluster it does not matter.
    let algorithm = algorithm.unwrap_or(Algorithm::Lz4);
    Ok(FileData::Compressed(Compressed { size: inode.size, algorithm, first, count }))
}
