//! The mount table (`/proc/self/mountinfo`, proc(5)), and which of its mounts are ours.

use crate::MountError;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

/// What overlay mounts of ours have as their source.
pub const OVERLAY_SOURCE: &str = "dsec";

/// One line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted.
    pub target: PathBuf,
    /// File system type.
    pub fs_type: String,
    /// Its source, as whoever mounted it wrote it.
    pub source: PathBuf,
    /// Options of the file system, still escaped.
    pub options: String,
}

impl Mount {
    /// The value of an option of the file system, such as `upperdir`.
    #[must_use]
    pub fn option(&self, key: &str) -> Option<PathBuf> {
        let value = self.options.split(',').find_map(|option| option.strip_prefix(key)?.strip_prefix('='))?;
        Some(unescape(value))
    }

    /// The upper directory of an overlay mount.
    ///
    /// The kernel shows the option as it was given. Given as a string, its backslashes were doubled for overlayfs, and
    /// given as a descriptor they were not, so the file system decides what is meant.
    #[must_use]
    pub fn upper_dir(&self) -> Option<PathBuf> {
        let shown = self.option("upperdir").filter(|_| self.fs_type == "overlay")?;
        let text = shown.as_os_str().as_bytes();
        if shown.exists() || !text.contains(&b'\\') {
            return Some(shown);
        }
        let mut bytes = text.iter().copied();
        let mut undone = Vec::with_capacity(text.len());
        while let Some(byte) = bytes.next() {
            undone.push(if byte == b'\\' { bytes.next().unwrap_or(byte) } else { byte });
        }
        Some(PathBuf::from(OsString::from_vec(undone)))
    }

    /// Whether [`crate::mount::mount`] made it: an overlay named `dsec`, or an EROFS mount of a store's blob.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        match self.fs_type.as_str() {
            "overlay" => self.source.as_os_str() == OVERLAY_SOURCE,
            "erofs" => is_blob(&self.source) || loop_backing(&self.source).is_some_and(|file| is_blob(&file)),
            _ => false,
        }
    }
}

/// Whether the path ends like a store's blob: `…/blobs/sha256/<64 hex digits>`.
fn is_blob(path: &Path) -> bool {
    let is_hex = |name: &str| name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_hex)
        && path.parent().is_some_and(|dir| dir.ends_with("blobs/sha256"))
}

fn loop_backing(device: &Path) -> Option<PathBuf> {
    let name = device.strip_prefix("/dev").ok()?.to_str().filter(|name| name.starts_with("loop"))?;
    let text = fs::read(Path::new("/sys/block").join(name).join("loop/backing_file")).ok()?;
    let text = text.strip_suffix(b"\n").unwrap_or(&text);
    let text = text.strip_suffix(b" (deleted)").unwrap_or(text);
    Some(PathBuf::from(OsString::from_vec(text.to_vec())))
}

/// Reads this process's mount table.
///
/// # Errors
/// When `/proc` is not there.
pub fn read() -> Result<Vec<Mount>, MountError> {
    let path = Path::new("/proc/self/mountinfo");
    Ok(parse(&String::from_utf8_lossy(&fs::read(path).map_err(MountError::io("read", path))?)))
}

/// Parses a mount table; lines that do not look like one are passed over.
#[must_use]
pub fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

/// `36 35 98:0 /root /target rw,noatime master:1 - ext3 /dev/sda1 rw,errors=continue`
fn parse_line(line: &str) -> Option<Mount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let target = mount.split(' ').nth(4)?;
    let mut fields = file_system.split(' ');
    Some(Mount {
        target: unescape(target),
        fs_type: fields.next()?.to_owned(),
        source: unescape(fields.next()?),
        options: fields.next().unwrap_or_default().to_owned(),
    })
}

/// Undoes the kernel's octal escapes (`\040` is a space).
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let octal = bytes
            .get(at + 1..at + 4)
            .filter(|digits| *byte == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        let value = octal.and_then(|d| u8::try_from(d.iter().fold(0u32, |n, d| n * 8 + u32::from(d - b'0'))).ok());
        out.push(value.unwrap_or(*byte));
        at += if value.is_some() { 4 } else { 1 };
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_table_is_read(text in "([ -~]|[\\\\, -]|[0-7]|\n| - overlay dsec |\\PC){0,200}") {
            for mount in parse(&text) {
                let _ = (mount.is_ours(), mount.upper_dir());
            }
        }

        #[test]
        fn what_the_kernel_escapes_comes_back(path in "(/[a-z ,\\\\\n\t#é]{1,9}){1,4}") {
            let escaped: String = path.chars().map(|c| match c {
                ' ' | ',' | '\\' | '\n' | '\t' | '#' => format!("\\{:03o}", u32::from(c)),
                c => c.to_string(),
            }).collect();
            let table = parse(&format!("1 2 0:3 / {escaped} rw - overlay dsec rw,lowerdir+=/,upperdir={escaped},xino=off"));
            prop_assert_eq!(&table[0].target, &PathBuf::from(&path));
            prop_assert_eq!(table[0].option("upperdir"), Some(PathBuf::from(&path)));
        }
    }

    #[test]
    fn lines() {
        let hex = "0".repeat(64);
        let table = parse(&format!(
            "29 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
             \n garbage - x\n\
             40 29 0:40 / /m/a\\040b\\134c rw master:3 - overlay dsec rw,upperdir=/u\\054\\040x,workdir=/w\n\
             41 29 0:41 / /e ro - erofs /s\\040t/blobs/sha256/{hex} ro,user_xattr\n\
             42 29 0:42 / /o ro - overlay overlay ro\n\
             43 29 0:43 / /f ro - erofs /images/other.img ro\n\
             44 29 0:44 / /n ro - tmpfs  rw\n"
        ));
        let ours: Vec<_> = table.iter().map(|mount| (mount.target.to_str().unwrap(), mount.is_ours())).collect();
        let expected = [("/", false), ("/m/a b\\c", true), ("/e", true), ("/o", false), ("/f", false), ("/n", false)];
        assert_eq!(ours, expected);
        assert_eq!(table[1].option("upperdir"), Some("/u, x".into()));
        assert_eq!(table[1].option("upper"), None);
        assert_eq!(table[2].source, PathBuf::from(format!("/s t/blobs/sha256/{hex}")));
        assert_eq!(unescape("a\\09\\777\\1"), PathBuf::from("a\\09\\777\\1"));
    }
}
