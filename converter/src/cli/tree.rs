//! Every inode of a metadata image, one line each.

use super::output::{self, Out};
use converter::entry::printable;
use converter::erofs::format::FileType;
use converter::erofs::read::{Data, Extent, Image, ReadError, Visit, layout_name};
use converter::read_at::ReadAt;
use serde_json::{Value, json};
use std::io::{self, Write as _};

/// Extents that a text line shows; JSON shows all.
const TEXT_EXTENTS: usize = 4;

/// Prints the tree; `layer` is shown in JSON.
pub(super) fn print<R: ReadAt>(image: &Image<R>, json: bool, layer: Option<usize>) -> anyhow::Result<()> {
    let mut failed = None;
    output::print(|out| {
        if !json {
            writeln!(out)?;
        }
        let mut walk = image.walk();
        while let Some(visit) = walk.next() {
            let node = visit.and_then(|visit| Node::read(image, &visit));
            match node {
                Ok(node) if json => output::json_line(out, &node.json(image, layer))?,
                Ok(node) => node.text(out, image)?,
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        Ok(())
    })?;
    failed.map_or(Ok(()), |e| Err(e.into()))
}

/// What is shown of one name.
struct Node {
    path: Vec<u8>,
    inode: converter::erofs::read::Inode,
    /// Whether this is the first name of its inode; others do not repeat where the data is.
    first: bool,
    link: Option<Vec<u8>>,
    xattrs: Vec<converter::entry::Xattr>,
    extents: Vec<Extent>,
}

impl Node {
    fn read<R: ReadAt>(image: &Image<R>, visit: &Visit<'_>) -> Result<Self, ReadError> {
        let inode = visit.inode.clone();
        let link = (inode.file_type() == FileType::Symlink).then(|| image.read_link(&inode)).transpose()?;
        let (xattrs, extents) = if visit.first {
            let extents =
                if inode.is_compressed() { Vec::new() } else { image.extents(&inode).collect::<Result<_, _>>()? };
            (image.xattrs(&inode)?, extents)
        } else {
            (Vec::new(), Vec::new())
        };
        Ok(Self { path: visit.path.to_vec(), inode, first: visit.first, link, xattrs, extents })
    }

    fn json<R: ReadAt>(&self, image: &Image<R>, layer: Option<usize>) -> Value {
        let i = &self.inode;
        let mut node = json!({
            "path": escaped(&self.path), "nid": i.nid, "type": type_name(i.file_type()), "mode": format!("{:04o}", i.mode & 0o7777),
            "uid": i.uid, "gid": i.gid, "size": i.size, "mtime": i.mtime.secs, "mtime_nsec": i.mtime.nanos,
            "nlink": i.nlink, "inode": if i.compact { "compact" } else { "extended" }, "layout": layout_name(i.layout),
        });
        let mut put = |key: &str, value: Value| node[key] = value;
        if let Some(layer) = layer {
            put("layer", layer.into());
        }
        if let Some(target) = &self.link {
            put("target", escaped(target).into());
        }
        if let Some((major, minor)) = i.device_number() {
            put("device", json!([major, minor]));
        }
        if self.first {
            let xattr = |x: &converter::entry::Xattr| json!({ "name": escaped(&x.name), "value": escaped(&x.value) });
            put("xattrs", self.xattrs.iter().map(xattr).collect());
            put("extents", self.extents.iter().map(|e| json_extent(image, e)).collect());
        } else {
            put("link", true.into());
        }
        node
    }

    fn text<R: ReadAt>(&self, out: &mut Out, image: &Image<R>) -> io::Result<()> {
        let i = &self.inode;
        let size = match i.device_number() {
            Some((major, minor)) => format!("{major}:{minor}"),
            None => i.size.to_string(),
        };
        write!(
            out,
            "{}{:04o} {}:{} {size:>10} {}.{:09} {} #{} /{}",
            type_letter(i.file_type()),
            i.mode & 0o7777,
            i.uid,
            i.gid,
            i.mtime.secs,
            i.mtime.nanos,
            i.nlink,
            i.nid,
            printable(&self.path),
        )?;
        if let Some(target) = &self.link {
            write!(out, " -> {}", printable(target))?;
        }
        for xattr in &self.xattrs {
            write!(out, " {}={}", printable(&xattr.name), printable(&xattr.value))?;
        }
        if !self.first {
            return writeln!(out, " (see the first name of #{})", i.nid);
        }
        write!(out, " {}", layout_name(i.layout))?;
        for extent in self.extents.iter().take(TEXT_EXTENTS) {
            write!(out, " {}", text_extent(image, extent))?;
        }
        if self.extents.len() > TEXT_EXTENTS {
            write!(out, " and {} more", self.extents.len() - TEXT_EXTENTS)?;
        }
        writeln!(out)
    }
}

/// Bytes as JSON text: UTF-8 as it is, other and control bytes as `\xNN`, backslashes doubled; never cut.
fn escaped(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    let hex = |out: &mut String, byte: u32| out.push_str(&format!("\\x{byte:02x}"));
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => out.push_str("\\\\"),
                c if c.is_ascii_control() => hex(&mut out, u32::from(c)),
                c => out.push(c),
            }
        }
        for byte in chunk.invalid() {
            hex(&mut out, u32::from(*byte));
        }
    }
    out
}

fn json_extent<R: ReadAt>(image: &Image<R>, extent: &Extent) -> Value {
    let (offset, len) = (extent.file_offset, extent.len);
    match extent.data {
        Data::Hole => json!({ "offset": offset, "len": len, "hole": true }),
        Data::Inline { offset: at } => json!({ "offset": offset, "len": len, "inline": at }),
        Data::Block { device, block } => {
            let blocks = len.div_ceil(u64::from(image.superblock().block_size()));
            json!({ "offset": offset, "len": len, "device": device, "block": block, "blocks": blocks })
        }
        Data::Compressed { device, block, blocks, algorithm } => json!({
            "offset": offset, "len": len, "device": device, "block": block, "blocks": blocks,
            "algorithm": algorithm.name(),
        }),
    }
}

fn text_extent<R: ReadAt>(image: &Image<R>, extent: &Extent) -> String {
    match extent.data {
        Data::Hole => format!("{}+{}:hole", extent.file_offset, extent.len),
        Data::Inline { .. } => format!("{}+{}:inline", extent.file_offset, extent.len),
        Data::Block { device, block } => {
            let blocks = extent.len.div_ceil(u64::from(image.superblock().block_size()));
            format!("{}+{}:device {device} block {block}+{blocks}", extent.file_offset, extent.len)
        }
        Data::Compressed { device, block, blocks, algorithm } => {
            let name = algorithm.name();
            format!("{}+{}:device {device} block {block}+{blocks} {name}", extent.file_offset, extent.len)
        }
    }
}

fn type_name(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Regular => "file",
        FileType::Directory => "directory",
        FileType::CharDevice => "char-device",
        FileType::BlockDevice => "block-device",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::Symlink => "symlink",
        FileType::Unknown => "unknown",
    }
}

fn type_letter(file_type: FileType) -> char {
    match file_type {
        FileType::Regular => '-',
        FileType::Directory => 'd',
        FileType::CharDevice => 'c',
        FileType::BlockDevice => 'b',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::Symlink => 'l',
        FileType::Unknown => '?',
    }
}
