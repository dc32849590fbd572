//! What several layers show together at one name: the one rule, for look-ups and for merging.

use crate::erofs::read::Inode;

/// A directory of one layer: the layer's position, 0 at the bottom, and the inode.
pub(crate) type InLayer = (usize, Inode);

/// Takes what the layers have at a name, topmost first, and tells what overlayfs makes of it.
#[derive(Debug, Default)]
pub(crate) struct Fold {
    directories: Vec<InLayer>,
    outcome: Option<Outcome>,
}

/// What is at a name.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// No layer has it.
    Nothing,
    /// It is hidden, whatever is further down.
    Whiteout,
    /// Something that is not a directory; it hides whatever is further down.
    Object(InLayer),
    /// The directories that are merged there, topmost first.
    Directory {
        /// At least one.
        layers: Vec<InLayer>,
        /// Whether they hide what is further down: one of them is opaque, or lies over something else.
        opaque: bool,
    },
}

impl Fold {
    /// Adds what the next lower layer has; `is_opaque` is asked for directories. Returns whether that settles it, so
    /// that nothing further down counts.
    pub(crate) fn add<E>(
        &mut self,
        layer: usize,
        inode: Inode,
        is_opaque: impl FnOnce(&Inode) -> Result<bool, E>,
    ) -> Result<bool, E> {
        debug_assert!(self.outcome.is_none(), "settled before");
        if inode.is_dir() {
            let opaque = is_opaque(&inode)?;
            self.directories.push((layer, inode));
            if opaque {
                self.close();
            }
        } else if !self.directories.is_empty() {
            self.close();
        } else if inode.is_whiteout() {
            self.outcome = Some(Outcome::Whiteout);
        } else {
            self.outcome = Some(Outcome::Object((layer, inode)));
        }
        Ok(self.outcome.is_some())
    }

    fn close(&mut self) {
        self.outcome = Some(Outcome::Directory { layers: std::mem::take(&mut self.directories), opaque: true });
    }

    pub(crate) fn finish(self) -> Outcome {
        match self.outcome {
            Some(outcome) => outcome,
            None if self.directories.is_empty() => Outcome::Nothing,
            None => Outcome::Directory { layers: self.directories, opaque: false },
        }
    }
}
