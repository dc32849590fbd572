//! A store that is no plain directory: blobs and names on a backend, files that are being written and copies of what was
//! read in a local directory.

use super::copies::Copies;
use super::options::StoreOptions;
use crate::blob_store::deadline::Deadline;
use crate::blob_store::metered::{Meter, MeterReader, Metered};
use crate::blob_store::retry::Retry;
use crate::blob_store::s3::{S3Blobs, S3Bucket};
use crate::blob_store::usrbio::UsrbioBlobs;
use crate::blob_store::{BlobError, BlobStore, Body, Listed, Stat};
use crate::names::dir::DirNames;
use crate::names::s3::S3Names;
use crate::names::{Condition, ListedName, NameStore, Named, PutOutcome};
use crate::store_dir::{self, WHOLE_BLOB_MAX};
use crate::{Digest, Hasher, Published, RefName, StoreDir, StoreError, StoreLocation, Swept};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use oci_spec::image::Descriptor;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::runtime::{Handle, Runtime};

/// The object that says that a prefix of a bucket is a store.
const MARKER: &str = "dsec-store.json";
/// Bytes that are read at once, and how often at a time.
const PIECE: u64 = 8 << 20;
const PARALLEL: usize = 4;
/// How often a blob is fetched that arrives with other bytes: they may have changed on their way.
const FETCHES: u32 = 3;
/// How often a ref is tried that others change.
const REF_ATTEMPTS: u32 = 20;
/// Refs that are read at a time.
const REFS_PARALLEL: usize = 16;
/// A blob whose age is less than this is not renewed.
const RENEW_AFTER: Duration = Duration::from_secs(10 * 60);
/// Objects `renewed/<hex>` say when a blob was renewed, where the backend cannot note it on the blob.
const RENEWED: &str = "renewed";

/// A store that is no plain directory.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    location: StoreLocation,
    runtime: Handle,
    _own_runtime: Option<Arc<OwnRuntime>>,
    blobs: Arc<dyn BlobStore>,
    names: Arc<dyn NameStore>,
    copies: Copies,
    meter: MeterReader,
    /// The directory, of a 3FS.
    dir: Option<StoreDir>,
    pub(super) lease_lasts: Duration,
}

/// A runtime that may be dropped anywhere.
#[derive(Debug)]
struct OwnRuntime(Option<Runtime>);

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Remote {
    /// A directory on 3FS.
    pub(super) fn fs3(dir: StoreDir, options: &StoreOptions) -> Result<Self, StoreError> {
        let location = StoreLocation::Fs3(dir.root().to_owned());
        let dir = dir.with_immutable(options.immutable);
        let (blobs, names) = (UsrbioBlobs::new(dir.clone(), &options.usrbio), DirNames::new(dir.clone()));
        Self::new(location, blobs, names, Some(dir), options)
    }

    /// A prefix of a bucket.
    pub(super) fn s3(bucket: &str, prefix: &str, options: &StoreOptions, create: bool) -> Result<Self, StoreError> {
        let location = StoreLocation::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() };
        let reached = match &options.s3 {
            Some(settings) => {
                let settings = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
                S3Bucket::from_settings(settings, bucket, prefix)?
            }
            None => S3Bucket::from_env(bucket, prefix)?,
        };
        let (blobs, names) = (S3Blobs::new(reached.clone(), options.retry), S3Names::new(reached, options.retry));
        let remote = Self::new(location, blobs, names, None, options)?;
        let missing = || StoreError::NotAStore { path: remote.location.to_string().into(), missing: MARKER };
        match (remote.object(MARKER)?, create) {
            (Some(_), _) => {}
            (None, false) => return Err(missing()),
            // Of several at once one makes it, and they all mean the same.
            (None, true) => {
                remote.put_object(MARKER, b"{\"dsec-store\":1}\n", &Condition::Absent)?;
            }
        }
        Ok(remote)
    }

    fn new(
        location: StoreLocation,
        blobs: impl BlobStore + 'static,
        names: impl NameStore + 'static,
        dir: Option<StoreDir>,
        options: &StoreOptions,
    ) -> Result<Self, StoreError> {
        let place = location.to_string();
        let local = options.local_dir_of(&place).ok_or_else(|| StoreError::NoLocalDirectory {
            store: place.clone(),
            why: "neither XDG_CACHE_HOME nor HOME is set; DSEC_STORE_CACHE names one too",
        })?;
        let copies = Copies::new(StoreDir::create(&local)?, options.local_limit);
        let (runtime, own) = match &options.runtime {
            Some(handle) => (handle.clone(), None),
            None => {
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .thread_name("store")
                    .enable_all()
                    .build()
                    .map_err(|e| StoreError::io("start threads for", &local, e))?;
                (runtime.handle().clone(), Some(Arc::new(OwnRuntime(Some(runtime)))))
            }
        };
        let metered = Metered::new(blobs);
        let meter = metered.reader();
        let blobs = Retry::new(Deadline::new(metered, options.limits, place.clone()), options.retry);
        let names = Retry::new(Deadline::new(names, options.limits, place), options.retry);
        Ok(Self {
            location,
            runtime,
            _own_runtime: own,
            blobs: Arc::new(blobs),
            names: Arc::new(names),
            copies,
            meter,
            dir,
            lease_lasts: options.lease_lasts,
        })
    }

    pub(super) fn location(&self) -> StoreLocation {
        self.location.clone()
    }

    pub(super) fn dir(&self) -> Option<&StoreDir> {
        self.dir.as_ref()
    }

    pub(super) fn copies(&self) -> &Copies {
        &self.copies
    }

    pub(super) fn without_old_copies(&self) -> Self {
        Self { copies: self.copies.fresh(), ..self.clone() }
    }

    pub(super) fn meter(&self) -> Meter {
        self.meter.snapshot()
    }

    /// The address of a blob, for errors.
    fn address(&self, digest: &Digest) -> PathBuf {
        format!("{}/blobs/sha256/{}", self.location, digest.hex()).into()
    }

    /// What a failure about a blob is to callers, who know them from directories.
    fn blob_error(&self, digest: &Digest, error: BlobError) -> StoreError {
        match error {
            BlobError::NotFound { .. } => StoreError::Missing { digest: *digest, path: self.address(digest) },
            BlobError::Local { what, op, source, .. } => StoreError::io(op, what.as_ref(), source),
            BlobError::Corrupt { how, .. } => {
                StoreError::Corrupt { digest: *digest, path: self.address(digest), what: how }
            }
            error => error.into(),
        }
    }

    pub(super) fn stat(&self, digest: &Digest) -> Result<Option<Stat>, StoreError> {
        match self.runtime.block_on(self.blobs.stat(digest)) {
            Ok(stat) => Ok(Some(stat)),
            Err(BlobError::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.blob_error(digest, error)),
        }
    }

    pub(super) fn open_blob(&self, digest: &Digest, size: u64) -> Result<File, StoreError> {
        if let Some(file) = self.copies.open(digest, size)? {
            return Ok(file);
        }
        let _fetching = self.copies.fetching(digest);
        // Somebody else may have made it while we waited.
        if let Some(file) = self.copies.open(digest, size)? {
            return Ok(file);
        }
        let mut attempt = 1;
        loop {
            match self.fetch(digest, size) {
                Err(StoreError::Corrupt { what, .. }) if attempt < FETCHES => {
                    tracing::warn!("{digest} arrived damaged ({what}), fetching it again");
                    attempt += 1;
                }
                done => return done,
            }
        }
    }

    /// Makes a copy, checks it, and opens it.
    fn fetch(&self, digest: &Digest, size: u64) -> Result<File, StoreError> {
        let staged = self.copies.dir().stage("fetch")?;
        let found = self.runtime.block_on(async {
            let pieces = (0..size.div_ceil(PIECE)).map(|n| n * PIECE..((n + 1) * PIECE).min(size));
            let mut pieces =
                futures::stream::iter(pieces).map(|piece| self.blobs.read_range(digest, piece)).buffered(PARALLEL);
            let mut hasher = Hasher::default();
            while let Some(bytes) = pieces.try_next().await.map_err(|e| self.blob_error(digest, e))? {
                hasher.update(&bytes);
                (&*staged).write_all(&bytes).map_err(|e| StoreError::io("write", staged.path(), e))?;
            }
            Ok::<_, StoreError>(hasher.finish())
        })?;
        // Nothing was asked for when it is empty, so whether it is there has to be.
        if size == 0 && self.stat(digest)?.is_none() {
            return Err(StoreError::Missing { digest: *digest, path: self.address(digest) });
        }
        if found != *digest {
            let what = format!("its contents have {found}");
            return Err(StoreError::Corrupt { digest: *digest, path: self.address(digest), what });
        }
        let path = staged.path().to_owned();
        let mut file = staged.handle().map_err(|e| StoreError::io("open", &path, e))?;
        if self.copies.worth_keeping(size) {
            // A copy that is there is the one that was not believed.
            self.copies.forget(digest)?;
            staged.publish(digest, size)?;
            self.copies.made(digest);
            self.copies.make_room()?;
        }
        // Without a name it lasts as long as it is open; so does one that was too large to keep.
        file.rewind().map_err(|e| StoreError::io("read", &path, e))?;
        Ok(file)
    }

    pub(super) fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.runtime.block_on(self.blobs.read_range(digest, range)).map_err(|e| self.blob_error(digest, e))
    }

    pub(super) fn read_blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>, StoreError> {
        if size > WHOLE_BLOB_MAX {
            return Err(StoreError::TooLarge { path: self.address(digest), size, limit: WHOLE_BLOB_MAX });
        }
        let mut damaged = None;
        for _ in 0..2 {
            let mut bytes = Vec::new();
            let path = self.copies.dir().blob_path(digest);
            let file = self.open_blob(digest, size)?;
            read_from_start(&file, size, &mut bytes).map_err(|e| StoreError::io("read", &path, e))?;
            let found = Digest::of(&bytes);
            if found == *digest {
                return Ok(bytes);
            }
            // The copy is damaged, since it was right when it was made; the store need not be.
            self.copies.forget(digest)?;
            damaged = Some(StoreError::Corrupt { digest: *digest, path, what: format!("its contents have {found}") });
        }
        Err(damaged.unwrap_or(StoreError::Missing { digest: *digest, path: self.address(digest) }))
    }

    /// Sends a local file, and keeps it as a copy.
    pub(super) fn publish(
        &self,
        staged: store_dir::Staged,
        digest: &Digest,
        size: u64,
    ) -> Result<Published, StoreError> {
        let written = staged.metadata().map_err(|e| StoreError::io("stat", staged.path(), e))?.len();
        if written != size {
            return Err(StoreError::ShortStage { digest: *digest, written, expected: size });
        }
        let existed = match self.stat(digest)? {
            Some(stat) if stat.size == size => {
                self.renew_if_old(digest, stat)?;
                true
            }
            _ => {
                let file = staged.handle().map_err(|e| StoreError::io("open", staged.path(), e))?;
                let body = Body::File { file: Arc::new(file), len: size };
                let put = self.runtime.block_on(self.blobs.put(digest, body));
                put.map_err(|e| self.blob_error(digest, e))?;
                false
            }
        };
        if self.copies.worth_keeping(size) && self.copies.dir().blob_size(digest)? != Some(size) && !existed {
            staged.publish(digest, size)?;
            self.copies.make_room()?;
        }
        Ok(Published { digest: *digest, size, existed })
    }

    pub(super) fn renew(&self, digest: &Digest) -> Result<(), StoreError> {
        match self.stat(digest)? {
            Some(stat) => self.renew_if_old(digest, stat),
            None => Ok(()),
        }
    }

    fn renew_if_old(&self, digest: &Digest, stat: Stat) -> Result<(), StoreError> {
        if let Some(dir) = &self.dir {
            return dir.renew(digest);
        }
        let young = |time: SystemTime| SystemTime::now().duration_since(time).is_ok_and(|age| age < RENEW_AFTER);
        if stat.modified.is_some_and(young) {
            return Ok(());
        }
        self.put_object(&format!("{RENEWED}/{}", digest.hex()), b"", &Condition::Always).map(drop)
    }

    pub(super) fn list_blobs(&self) -> Result<Vec<Listed>, StoreError> {
        let all: Vec<Listed> = self.runtime.block_on(self.blobs.list().try_collect())?;
        if self.dir.is_some() {
            return Ok(all);
        }
        let renewed: HashMap<String, SystemTime> =
            self.list_objects(RENEWED)?.into_iter().map(|listed| (listed.name, listed.modified)).collect();
        let newest = |mut listed: Listed| {
            let renewed = renewed.get(&format!("{RENEWED}/{}", listed.digest.hex())).copied();
            listed.stat.modified = listed.stat.modified.max(renewed);
            listed
        };
        Ok(all.into_iter().map(newest).collect())
    }

    pub(super) fn delete_blob(&self, digest: &Digest) -> Result<(), StoreError> {
        self.runtime.block_on(self.blobs.delete(digest)).map_err(|e| self.blob_error(digest, e))?;
        if self.dir.is_none() {
            self.delete_object(&format!("{RENEWED}/{}", digest.hex()))?;
        }
        self.copies.forget(digest)
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<Named>, StoreError> {
        Ok(self.runtime.block_on(self.names.get(name))?)
    }

    pub(super) fn put_object(&self, name: &str, bytes: &[u8], condition: &Condition) -> Result<PutOutcome, StoreError> {
        Ok(self.runtime.block_on(self.names.put(name, Bytes::copy_from_slice(bytes), condition))?)
    }

    pub(super) fn delete_object(&self, name: &str) -> Result<(), StoreError> {
        Ok(self.runtime.block_on(self.names.delete(name))?)
    }

    pub(super) fn list_objects(&self, below: &str) -> Result<Vec<ListedName>, StoreError> {
        Ok(self.runtime.block_on(self.names.list(below).try_collect())?)
    }

    pub(super) fn write_ref(&self, name: &RefName, descriptor: &Descriptor) -> Result<(), StoreError> {
        if let Some(dir) = &self.dir {
            return dir.write_ref(name, descriptor);
        }
        let bytes = store_dir::ref_bytes(descriptor);
        let object = ref_object(name);
        for _ in 0..REF_ATTEMPTS {
            let condition = match self.object(&object)? {
                Some(there) if there.bytes == bytes => return Ok(()),
                Some(there) => Condition::Unchanged(there.version),
                None => Condition::Absent,
            };
            if let PutOutcome::Done(_) = self.put_object(&object, &bytes, &condition)? {
                return Ok(());
            }
        }
        Err(StoreError::Contended { name: name.clone(), attempts: REF_ATTEMPTS })
    }

    pub(super) fn read_ref(&self, name: &RefName) -> Result<Descriptor, StoreError> {
        if let Some(dir) = &self.dir {
            return dir.read_ref(name);
        }
        let named = self.object(&ref_object(name))?;
        let named = named.ok_or_else(|| self.no_such_ref(name))?;
        self.parse_ref(&ref_object(name), &named.bytes)
    }

    fn no_such_ref(&self, name: &RefName) -> StoreError {
        StoreError::NoSuchRef { name: name.clone(), store: self.location.to_string() }
    }

    fn parse_ref(&self, object: &str, bytes: &[u8]) -> Result<Descriptor, StoreError> {
        let bad = |source| StoreError::BadRef { path: format!("{}/{object}", self.location).into(), source };
        serde_json::from_slice(bytes).map_err(bad)
    }

    pub(super) fn list_refs(&self) -> Result<Vec<(RefName, Descriptor)>, StoreError> {
        if let Some(dir) = &self.dir {
            return dir.list_refs();
        }
        let names: Vec<RefName> = self.list_objects("refs")?.iter().filter_map(|o| ref_name(&o.name)).collect();
        let read = |name: RefName| async move {
            let object = ref_object(&name);
            // One that was removed while we were listing is none.
            let Some(named) = self.names.get(&object).await? else { return Ok(None) };
            Ok::<_, StoreError>(Some((name, self.parse_ref(&object, &named.bytes)?)))
        };
        let reads = futures::stream::iter(names).map(read).buffer_unordered(REFS_PARALLEL);
        let mut found: Vec<_> = self.runtime.block_on(reads.try_filter_map(|r| async { Ok(r) }).try_collect())?;
        found.sort_by(|a: &(RefName, Descriptor), b| a.0.cmp(&b.0));
        Ok(found)
    }

    pub(super) fn remove_ref(&self, name: &RefName) -> Result<(), StoreError> {
        if let Some(dir) = &self.dir {
            return dir.remove_ref(name);
        }
        let object = ref_object(name);
        if self.object(&object)?.is_none() {
            return Err(self.no_such_ref(name));
        }
        self.delete_object(&object)
    }

    pub(super) fn sweep(&self) -> Result<Swept, StoreError> {
        self.copies.make_room()?;
        let mut swept = self.copies.dir().sweep()?;
        if let Some(dir) = &self.dir {
            let there = dir.sweep()?;
            swept.removed += there.removed;
            swept.alive += there.alive;
            swept.foreign += there.foreign;
        }
        Ok(swept)
    }
}

fn ref_object(name: &RefName) -> String {
    format!("refs/{}", name.store_path().display())
}

fn ref_name(object: &str) -> Option<RefName> {
    let (dir, tag) = object.strip_prefix("refs/")?.split_once('/')?;
    RefName::from_store_path(dir, tag)
}

/// Reads without moving the position that all holders of a file share.
fn read_from_start(file: &File, size: u64, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    bytes.resize(usize::try_from(size).unwrap_or(usize::MAX), 0);
    file.read_exact_at(bytes, 0)
}
