//! Layers and stacks that several disks use at once, opened once.

use super::open::{Where, find, open, refuse_turbo_upper};
use super::spec::{ImageSpec, Lower};
use super::{Image, ImageError, Shared};
use crate::backend::{Blobs, ReadError};
use crate::layer::Layer;
use fs3_client::Digest;
use std::collections::HashMap;
use std::hash::Hash;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What tells a file or blob from another. A file that is replaced or written to is another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Identity {
    File { device: u64, inode: u64, size: u64, modified: (i64, i64), changed: (i64, i64) },
    Blob(Digest, u64),
}

impl Identity {
    fn of(path: &Path) -> Result<Self, ReadError> {
        let found = std::fs::metadata(path);
        let found = found.map_err(|source| ReadError::Local { what: path.display().to_string(), source })?;
        Ok(Self::File {
            device: found.dev(),
            inode: found.ino(),
            size: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// A layer with the files that it refers to.
type Key = Vec<Identity>;

/// Opens lower layers, and stacks of them, once for all disks that use them at the same time: a thousand disks over one
/// image have one index in memory, one jump table a layer, and one file descriptor a layer.
///
/// What nobody uses any more is forgotten. Any number of threads may open at once; nobody waits for another's backend.
#[derive(Debug, Default)]
pub struct Shelf {
    layers: Mutex<HashMap<Key, Weak<Layer>>>,
    images: Mutex<HashMap<Vec<Key>, Weak<Shared>>>,
}

impl Shelf {
    /// The lower layers of the configuration that messages call `what`, stacked. As
    /// [`lowers`](super::lowers) and [`Image::sized_or_not`].
    ///
    /// # Errors
    /// A key is wrong, a layer is not to be had, or cannot be read; there are too many.
    pub fn open(&self, spec: &ImageSpec, what: &str, blobs: Option<&dyn Blobs>) -> Result<Image, ImageError> {
        refuse_turbo_upper(spec, what)?;
        let keys = spec.lowers.iter().enumerate().map(|(number, lower)| key(what, number, lower, blobs.is_some()));
        let keys = keys.collect::<Result<Vec<Key>, _>>()?;
        if let Some(shared) = found(&self.images, &keys) {
            return Ok(Image { shared });
        }
        let mut layers = Vec::with_capacity(keys.len());
        for (number, (lower, key)) in spec.lowers.iter().zip(&keys).enumerate() {
            let layer = match found(&self.layers, key) {
                Some(layer) => layer,
                None => put(&self.layers, key, Arc::new(open(spec, what, number, lower, blobs)?)),
            };
            layers.push(layer);
        }
        let image = Image::sized_or_not(layers)?;
        Ok(Image { shared: put(&self.images, &keys, image.shared) })
    }
}

fn key(what: &str, number: usize, lower: &Lower, can_fetch: bool) -> Result<Key, ImageError> {
    let mut key = vec![match find(what, number, lower, can_fetch)? {
        Where::File(path) => Identity::of(&path)?,
        Where::Blob(digest, size) => Identity::Blob(digest, size),
    }];
    if let Some(target) = &lower.target {
        let files = target.file.iter().chain(&target.gzip_index);
        key.extend(files.map(|file| Identity::of(file)).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(key)
}

fn found<K: Hash + Eq, T>(shelf: &Mutex<HashMap<K, Weak<T>>>, key: &K) -> Option<Arc<T>> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner).get(key).and_then(Weak::upgrade)
}

/// Puts `new` on the shelf, and gives what others are to use: that of whoever was first.
fn put<K: Hash + Eq + Clone, T>(shelf: &Mutex<HashMap<K, Weak<T>>>, key: &K, new: Arc<T>) -> Arc<T> {
    let mut shelf = shelf.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(first) = shelf.get(key).and_then(Weak::upgrade) {
        return first;
    }
    shelf.retain(|_, held| held.strong_count() > 0);
    shelf.insert(key.clone(), Arc::downgrade(&new));
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Device;
    use crate::write::Silent;
    use crate::write::commit::{Wrapping, commit};
    use crate::write::plan::Names;

    /// A committed layer of one mapping of `sectors` sectors.
    fn layer(path: &Path, sectors: u64) {
        let dir = tempfile::tempdir().unwrap();
        let (data, index) = (dir.path().join("d"), dir.path().join("i"));
        let upper = crate::upper::Upper::create(&data, &index, 1 << 20, crate::upper::Limits::default()).unwrap();
        for sector in 0..sectors {
            // Not one after the other, so that each is a mapping.
            upper.write(sector * 2, &[7; 512]).unwrap();
        }
        upper.flush().unwrap();
        drop(upper);
        let pair = Layer::open_pair(&data, Some(&index)).unwrap();
        let wrapping = Wrapping { compression: None, tar: false, threads: 1, replace: true };
        commit(&pair, &Names::default(), path, wrapping, &Silent).unwrap();
    }

    #[test]
    fn a_thousand_disks_have_one_index() {
        let dir = tempfile::tempdir().unwrap();
        layer(&dir.path().join("a"), 900);
        layer(&dir.path().join("b"), 3);
        let json = r#"{"lowers": [{"file": "a"}, {"file": "b"}]}"#;
        let spec = ImageSpec::parse(json.as_bytes(), "c", dir.path()).unwrap();
        let shelf = Shelf::default();
        let disks: Vec<_> = (0..1000)
            .map(|_| {
                let image = shelf.open(&spec, "c", None).unwrap();
                (Device::over(&image, None).unwrap(), image)
            })
            .collect();
        let stack = disks[0].1.stack();
        assert!(stack.len() >= 900);
        assert!(disks.iter().all(|(_, image)| Arc::ptr_eq(image.stack(), stack)));
        // The devices and the image itself: one stack for all.
        assert_eq!(Arc::strong_count(stack), 1000 + 1);
        // Another stack over the same base shares the base.
        let other = ImageSpec::parse(br#"{"lowers": [{"file": "a"}]}"#, "c", dir.path()).unwrap();
        let other = shelf.open(&other, "c", None).unwrap();
        assert!(Arc::ptr_eq(&other.layers()[0], &disks[0].1.layers()[0]));

        // What was replaced is another file, and what nobody uses is gone.
        layer(&dir.path().join("b"), 4);
        let new = shelf.open(&spec, "c", None).unwrap();
        assert!(!Arc::ptr_eq(new.stack(), stack));
        assert!(Arc::ptr_eq(&new.layers()[0], &disks[0].1.layers()[0]));
        drop(disks);
        layer(&dir.path().join("b"), 5);
        shelf.open(&spec, "c", None).unwrap();
        assert_eq!(shelf.images.lock().unwrap().values().filter(|image| image.strong_count() > 0).count(), 2);
    }
}
