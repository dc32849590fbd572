//! Every decision that a converter of OCI layers has to take because no document takes it, with its reason.
//!
//! This page holds no code. Identifiers such as `W01` name a decision in tests too: `cargo test -p converter w01` runs
//! what proves it. Where a decision belongs to one parser, that module's own page has it and this one only points
//! there: [`crate::tar`] (archives), [`crate::unpack`] (compression), [`crate::source`] (manifests).
//!
//! Three rules stand behind nearly all of them:
//!
//! 1. **The mounted stack shows what an extractor would have written**, had it applied the layers one after the other
//!    into an empty directory. Where extractors differ, the one that loses nothing and never leaves the root wins.
//! 2. **A layer's bytes depend on its contents alone**: not on the order of its entries, the number of threads, the
//!    machine, the clock or the user. What has to come from lower layers is part of the contents then.
//! 3. **What cannot be kept is refused, or left out with a warning that names the entry.** Nothing is changed silently.
//!
//! # What a layer takes from the layers below
//!
//! Layers are converted without one another and keep their whiteouts (W09), so that they can run in parallel, be shared
//! by images and be stacked in other orders later. Some things cannot be known from one layer alone. They are settled
//! after the lower layers are published, against their metadata images (the private module `stack`), merged the way
//! overlayfs merges them:
//!
//! - **A directory without an entry of its own** takes mode, owner, time and attributes of the directory it will be
//!   merged with, the root included (T10). An overlay shows the topmost directory's attributes, so 0755 root:root here
//!   would overwrite what the base says about `/etc`.
//! - **Where a lower layer has a symbolic link in that place**, the contents go to where the link leads, inside the
//!   root (T12). Bases with `/lib -> usr/lib` and later layers with `lib/x` are the ordinary case of it. Up to 40 links
//!   are followed, as the kernel does. Where this layer has a file at the new place already,
//!   that one stays, and a warning names it. A whiteout there keeps nothing out, since it acted before. A whiteout that
//!   itself lies behind such a link follows the links of lower layers only, for the same reason.
//! - **Where no lower layer has that directory**, and it holds nothing but whiteouts, it is left out with them (W04,
//!   W05): an extractor would have found nothing to remove.
//! - **Where another kind of file is there**, the directory stays, hides it, and a warning says so. With nothing but
//!   whiteouts in it, it is left out.
//! - **A hard link to a file that only a lower layer has** brings that file into this layer under both names, as one
//!   inode (L02). Its data is not copied: the lower layer's data blob becomes one more device of this layer's metadata
//!   image. overlayfs cannot share an inode between layers, so a name that stayed below would be another file from now
//!   on. A name that this layer whites out or replaces stays as this layer has it.
//!
//! Where the lower layers are not known (`tar:` and `dir:` sources), implied directories keep 0755 root:root and hard
//! links out of the layer are left out, with a warning, and recorded in the manifest ([`crate::manifest::Unresolved`]).
//! In a whole image, a link that no layer can satisfy is an error: an image with a missing file is worse than none.
//!
//! # Whiteouts
//!
//! - The **name alone** decides (W08): a `.wh.x` that is a hard link, a symlink, a directory or a file with contents
//!   hides `x`, and its contents are thrown away. Real images carry such entries.
//! - **The last component alone** is looked at, by its first four bytes `.wh.` (W10): `a.wh.b`, `.wh` and `.wherever`
//!   are names like others.
//! - A whiteout acts on lower layers only, **wherever it stands among the entries** (W01). With an entry of the same
//!   name in the same layer, a directory becomes opaque (it was removed and made again; without an entry of its own it
//!   still gets the lower one's attributes), and anything else needs no whiteout, since it hides the lower name by
//!   being there.
//! - `.wh..wh..opq` makes its directory **opaque**; exactly this name, no other spelling (W07). The directory keeps the
//!   attributes that its entry, or the lower layer, gives it.
//! - All other `.wh..wh.*` names are AUFS' own bookkeeping and never reach the image, nor does what lies below them
//!   (W07).
//! - Whiteouts **below an opaque directory** are dropped, at any depth (W06): the kernel does not look for lower files
//!   there, and would list them as entries that cannot be opened.
//! - Whiteouts of what no lower layer has stay, and hide nothing (W05). But for the directories above they are not
//!   looked up: a layer may be stacked on others later.
//! - `.wh.`, `.wh..` and `.wh...` would hide the empty name, `.` or `..`: the layer is refused.
//! - Entries inside a directory that is itself named as a whiteout are left out with a warning.
//! - Parents of a whiteout that have no entry are made like any other implied parent (W04).
//! - A `dir:` source has no whiteouts: a file called `.wh.x` is a file (D03 is the same question the other way round).
//!
//! In the image a whiteout is a character device 0:0, which every overlayfs knows; all of a layer's are names of one
//! inode, so that each costs a directory entry and no more. An opaque directory has `trusted.overlay.opaque=y`. A
//! directory that has whiteouts and is not opaque has an empty `trusted.overlay.origin`: without it the kernel does not
//! treat a directory that only one layer has as merged, and shows the devices. With `--userxattr` the prefix is
//! `user.overlay.` (O10); one image uses one of the two.
//!
//! Every layer keeps its whiteouts, the bottom one too: it may be put on top of something.
//!
//! # Several entries of one path
//!
//! Later entries replace earlier ones, as extraction would (T11, L06). In particular:
//!
//! - A directory over a directory keeps the contents and takes the later attributes.
//! - Anything else over a directory takes its place, and what was inside is gone.
//! - A directory over anything else is opaque: what it replaces had replaced what lower layers have there.
//! - A hard link to a path that is replaced later in the same layer is a link to what has the path in the end only if
//!   the path had nothing before (L03); an extractor over a lower layer that has it links to that one. No producer is
//!   known to write such a layer.
//! - A directory entry over a symbolic link replaces the link. (Only *parents* are followed through links, below.)
//! - An entry below a path that is a regular file, device, fifo or socket in this layer is refused: no extractor can
//!   write it.
//! - Replaced data is not in the blob: the blob is put in order afterwards if any was (see *Tree order*).
//!
//! # Hard links
//!
//! - A link makes another name of one inode. What the link's own header says of mode, owner, times and attributes is
//!   ignored: there is one inode, and its own entry describes it.
//! - The target may **come later** in the archive (L03), and may itself be such a link.
//! - A link **to itself**, or to a name that already is the same inode, changes nothing (L01).
//! - **Absolute** targets start at the image's root (L05). Targets with `..` are refused (L09).
//! - Parents of the target that are symbolic links are followed; a link to a symbolic link is another name of that
//!   link.
//! - Links to **directories** are refused: Linux has none.
//! - Missing parents of the new name are made (L04).
//! - Link counts are counted from the names that the finished tree has (L07, L08), never taken from a header.
//!
//! # Paths
//!
//! - **Absolute names** lose their leading slashes; `.` and doubled slashes mean nothing; `/`, `.` and `./` are the
//!   root (T01). Only a directory can be the root (T12).
//! - **`..` in an entry's path or hard link target is refused**, also where it would not lead out. Nothing that builds
//!   images writes it, and extractors differ on it. In a symbolic link's text it is data, and kept.
//! - **Parents that are symbolic links in this layer** are followed inside the root: absolute targets start at the
//!   root, `..` at the root stays there, at most 40 links (T12). So `esc -> /tmp/out` and then `esc/x` make
//!   `/tmp/out/x` of the image.
//! - **Implied parents** are 0755, owned by 0:0, with time 0 (T10), unless a lower layer says better. Never the
//!   converting user's ids, never the time of the conversion. An entry of their own that comes later describes them.
//! - **The root** always exists. Without an entry it is an implied directory.
//! - **The empty name** is the root if it belongs to a directory; with anything else the layer is refused (T02).
//! - **Bytes are bytes** (T13): names need not be UTF-8, and are printed escaped.
//! - A component **longer than 255 bytes** is refused by name (T16): EROFS and Linux cannot hold it. The length of the
//!   whole path is not limited. Directory depth costs memory in proportion, not stack.
//! - A symbolic link's text has 1 to 4,095 bytes, else the layer is refused: the kernel could neither make nor follow
//!   it.
//!
//! # Kinds and modes
//!
//! - **Sockets** are kept where a directory source has one (D04); tar has no type for them.
//! - **Devices** with a major number above 4,095 or a minor above 1,048,575 are refused (T21): Linux has no such
//!   device, and cutting the number would name another one.
//! - **A character device 0:0 in the source** (X03) would act as a whiteout of ours. It becomes an empty regular file
//!   with the overlay's other whiteout form, escaped once (`trusted.overlay.overlay.whiteout`, and `…overlay.opaque=x`
//!   on its directory), and a warning. Seen through the mounted root it is the xattr form of a whiteout, for an
//!   overlayfs inside the sandbox.
//! - **Permission bits** are kept with setuid, setgid and sticky (T18). **Symbolic links** are always 0777, which is
//!   all that Linux ever shows, whatever the archive says.
//! - **Ids** are numbers, up to 2^32 - 2 (T14). 2^32 - 1 is no id but chown's "as it is": it becomes 0, as extraction
//!   by root leaves it, with a warning; the kernel would let nobody write or copy up such a file. User and group names
//!   are ignored: they mean nothing outside the image.
//! - **Times** are mtimes with nanoseconds, before 1970 too (T07). Access and change times are not kept: EROFS has one
//!   time.
//!
//! # Extended attributes
//!
//! - Names are kept in full; values are bytes, empty ones too (X01, X02). Sets are sorted by name, so the order in the
//!   archive makes no difference (X04); of a name that comes twice the last counts.
//! - EROFS holds `user.`, `trusted.`, `security.` and the two POSIX ACL names. **Others are left out** with a warning
//!   each, as are names of more than 255 bytes behind the prefix, values of more than 65,535 bytes, and what exceeds 64
//!   KiB on one inode.
//! - Attributes of the source that already have **overlayfs' prefix** are escaped once (`trusted.overlay.x` becomes
//!   `trusted.overlay.overlay.x`). The kernel (6.7 and later) undoes this when they are read through the mounted root,
//!   so the sandbox sees what the image had, and the image cannot pose as the layer format. Only the prefix in use is
//!   escaped; the other one means nothing to such a mount.
//! - ACLs as text are converted as a whole or left out as a whole (X06); see [`crate::tar`].
//! - Attributes are shared where that makes the image smaller: a value used by `n` inodes moves to the shared area when
//!   one record and `n` four-byte ids are fewer bytes than `n` records.
//! - In a stack the topmost layer's set counts, not a union (X08): that is overlayfs' rule.
//!
//! # Contents of files
//!
//! - **Small files lie beside their inode**: those with at most `--inline-max` bytes for which 64 (the larger inode)
//!   plus the attributes, none of them shared, plus the contents fit one block of 4,096. That is known when the file's
//!   header is, so the choice depends on the file alone and never on the rest of the layer. Without attributes it is
//!   4,032 bytes.
//! - **Empty files** have no data at all.
//! - **Holes stay holes** (T09, T15): a chunk that the archive does not have, or whose bytes are all zero, has the null
//!   index and is not stored. Reading gives the same zeros, so a zero chunk need not be told from a hole. A file that
//!   is one hole has one chunk of up to 8 TiB. Small files keep their zeros.
//! - **Identical chunks** of a layer are stored once, by BLAKE3 of the chunk padded to whole blocks.
//! - The padding of a file's last chunk is zero.
//!
//! # Chunk size
//!
//! Each file has one power-of-two chunk size between 4 KiB and 16 KiB: the smallest that covers the file, else 16 KiB
//! ([`crate::blob::ChunkSizes`]). A file of more than 2^20 chunks gets larger ones, up to 1 MiB; one of more than 2^26
//! chunks (64 TiB) is refused. The size depends on the file's length alone, so that the same contents give the same
//! chunks in every layer.
//!
//! Three things pull in different directions. Each chunk costs an 8-byte index in the metadata image, which must be
//! local before a sandbox starts, and 40 bytes in the chunk table: that asks for large chunks. Deduplication finds only
//! whole equal chunks, and no chunk may cross a 1 MiB boundary, so that larger ones leave larger gaps before it: that
//! asks for small ones. The kernel reads through one index at a time and joins what lies together. Measured on three
//! real layers (1.37 GB of tar; `benches chunks`, figures in `docs/benchmarks.md`):
//!
//! | largest chunk | metadata | data | found twice |
//! |---|---|---|---|
//! | 4 KiB | 45.2 MiB | 1,211 MiB | 39.8 MiB |
//! | **16 KiB** | 43.6 MiB | 1,223 MiB | 32.6 MiB |
//! | 64 KiB | 43.2 MiB | 1,244 MiB | 25.8 MiB |
//! | 256 KiB | 43.1 MiB | 1,285 MiB | 21.2 MiB |
//! | 1 MiB | 43.1 MiB | 1,371 MiB | 20.2 MiB |
//!
//! Read speed is the same for all of them (1.9 to 2.0 GB/s in sequence, 320,000 random reads a second, from memory).
//! 16 KiB gives two thirds of what 4 KiB gives for a fifth of its indexes, and a quarter of its chunk table.
//!
//! # The data blob
//!
//! - Chunks start at blocks of 4,096 bytes, so that they can be mapped and shared.
//! - **No chunk crosses a multiple of 1 MiB** of the blob. A blob can then be cut into segments of 1, 2 or 4 MiB, each
//!   a device of its own ([`crate::erofs::remap`]), without touching the data. The gap before a boundary is filled with
//!   zeros.
//! - Files follow one another in tree order: what is installed together lies together, and read-ahead is worth
//!   something.
//! - A layer whose files are all small or empty has no blob.
//! - The chunk table ([`crate::chunk_table`]) has a digest for each stored chunk, so that part of a blob can be
//!   checked.
//!
//! # Tree order, and why the bytes are canonical
//!
//! Inodes, directory blocks and chunks are written depth first, a directory before its contents, names in byte order.
//! An inode with several names has its place at the first of them. So the same tree gives the same bytes, whatever the
//! order of the archive's entries, and whatever entries replaced one another.
//!
//! Chunks are written while the archive is read, in its order, since nearly all archives are sorted. Afterwards
//! [`crate::blob::order::is_canonical`] compares the blob with the tree; where it is not what tree order would have
//! given (an unsorted archive, a replaced file), [`crate::blob::order::rewrite`] copies the chunks in use into a new
//! blob. The price is one more pass over the data of such a layer. That waits until the tree is settled against the lower
//! layers, since contents may move behind their symbolic links.
//!
//! # Chunks of other images
//!
//! With `--dedup` a layer refers to chunks that other layers' blobs have ([`crate::dictionary`]); `docs/dedup.md` says what
//! for and how. Decided here:
//!
//! - **Not by default.** What a layer becomes then depends on what the store had: rule 2 holds only with the dictionary as
//!   part of the input, and a copy of the layer needs the other blobs too. Whoever fills one store asks for it.
//! - **A snapshot an image.** Layers of one image are looked up in what was known before the image, not in one another's
//!   blobs: else the result would depend on which thread is first. Equal chunks of two layers of a new image are
//!   stored twice; those of the next image are not.
//! - **What decides a record's key** is whether a layer may refer to others, to which, and how many; not what the dictionary
//!   knew. An earlier result with less knowledge is stored already, so nothing is saved by making another. For the
//!   same reason a run with deduplication takes a layer that stands alone; never the other way round.
//! - **A chunk is equal to one of as many blocks**: the digest is of whole blocks, the last one padded. Chunk sizes of files
//!   need not agree, since an index names a first block, and how many follow is decided by the file's size. In a blob of
//!   a compressed layer chunks may lie across a multiple of 1 MiB: those are for other compressed layers only.
//! - **A compressed cluster is found by algorithm, length and digest of its plain bytes**, whatever its level: it is not
//!   compressed at all then. EROFS wants one algorithm a file, and plain clusters beside it: so the same algorithm, or
//!   plain blocks.
//! - **Which blobs become devices** is decided by the final tree, when the layer is known: the ones that save most, each at
//!   least `--min-saved`, at most `--max-devices` ([`crate::blob::foreign::choose`]). Of chunks found in others the bytes are
//!   copied, and checked against their digest. One place for each chunk is considered, not all: blobs that many layers
//!   refer to come first in the dictionary, which leads to few devices without solving a set cover.
//! - **The table's word is taken** for what a blob holds, as a mount takes the metadata image's: reading every chunk back
//!   would cost as much as storing it. `--dedup-verify` does it. The dictionary's word is checked as far as a place must
//!   make sense: numbers that do not, are no hit.
//! - **Gone blobs.** A blob counts if it is there in its length, looked for once an image, and again when the layer is
//!   published, through the writer's store, which claims it. One that goes between is an error that names it: the chunks
//!   are not at hand any more.
//!
//! # Compression
//!
//! - **Clusters of fixed input**, compressed one by one: so threads need nothing of each other, the bytes are the same
//!   whatever their number, a cluster can be found by its input's digest before it is compressed, and one that another
//!   image has can be referred to. The price is the unused rest of each cluster's last block. The other way, filling
//!   stored clusters of a fixed size, needs each cluster to end where the one before began, in this file only.
//! - **The last cluster of a file takes up a rest of less than half a cluster.** Otherwise a file of 66 KiB would have a
//!   second cluster of 2 KiB that saves nothing and cannot be shared.
//! - **128 KiB by default** ([`crate::blob::clusters`]): figures in `docs/benchmarks.md`.
//! - **One codec for a layer**, in the order of its options; what a hard link brings in from below stays as it is there.
//! - **What gains nothing is plain**: a cluster that would not save a block, and a file of such clusters only, which is
//!   an ordinary chunked file then. Inline files stay inline and plain.
//! - **Zeros** are a cluster like others, of one block, since compressed files have no holes. Only where a large file is
//!   mostly zeros and its map of 8 bytes a block costs more than compression saves is it stored plain with holes. That is
//!   known at its end only, so the blob is written again then.
//! - **No segments.** The map of a compressed file has no device ids, so its clusters cannot be attached piece by piece as
//!   devices of their own ([`crate::erofs::remap`] refuses such images), and to keep clear of multiples of 1 MiB would
//!   only cost room: 1 to 5 % of the blob.
//! - **Full index**, not the compact one: that has block numbers for groups of clusters which must follow one another, and
//!   clusters that are stored once do not.
//! - **zstd frames** have magic numbers and the content's size, no checksum; windows are at most 256 KiB. The levels are
//!   zstd's own, 1 to 22; LZ4 has the fast compressor (`lz4`) and the high compression (`lz4hc`), in one format.
//!
//! # The metadata image
//!
//! - **Compact inodes** (32 bytes) have no time of their own but the superblock's. That time is the commonest mtime of
//!   the layer (of several, the earliest). Inodes with another time, with ids or link counts above 65,535 or with 4 GiB
//!   and more are extended (64 bytes).
//! - **An inode and what is beside it** stay inside one block where they fit one; the gaps that this leaves are filled
//!   by the best fit, so the order of inodes in the file is not quite tree order, but a function of it.
//! - **The UUID** is made of the image's BLAKE3 (version 8 of RFC 9562): no randomness, and different images have
//!   different ones.
//! - **The device table** follows the superblock. A slot's tag is the 64 hex digits of its blob's SHA-256, so that
//!   whoever attaches the devices can check their order; `blocks` is the blob's length. Addresses are per device; the
//!   unified address space is used by compressed files alone.
//! - **Features** are set only where used. An image with data needs Linux 5.16 (device table), or 6.10 with zstd; one without needs 5.4.
//!   Mounting it from files, without loop devices, needs 6.12; the format does not depend on that.
//! - **Inode numbers** for 32-bit `stat` count from 1 in tree order.
//! - Blocks are always 4,096 bytes (O07): smaller ones do not work with file-backed mounts on all kernels.
//!
//! # The store
//!
//! - **Reuse.** A finished layer leaves a record under `converted/`, named by the SHA-256 of everything that decides
//!   its bytes: the format version ([`crate::convert::FORMAT_VERSION`]), the source's digest and diffID, whether it
//!   belongs to a whole image, the layers below *if it took anything from them*, the inline limit, the chunk size, the
//!   compression and the xattr namespace. Limits are not part of it, since they only decide whether there is a result. A record whose
//!   blobs are not all there in their lengths is ignored. A layer that is reused is not read again: damage that its
//!   source took since is not noticed. Sources without a digest (`tar:`, `dir:`) have no record.
//! - **Order of publishing.** Data blob, chunk table, metadata image, record, config, manifest, ref: nothing names what
//!   is not there yet, so a crash between any two leaves a sound store, and what was finished is used by the next run.
//!   Names appear by rename after the contents are on disk; unfinished files are in `tmp/`, locked by their writer, and
//!   removed by the next conversion when the lock is free. `docs/store.md` has the rest.
//! - **Leases and gc.** Every conversion has a writer's lease from before it looks for anything in the store until its
//!   ref is written ([`fs3_client::gc`]). Records are not roots: a layer that no image names is removed after the grace,
//!   and its record with it. What a manifest reaches is every digest in it, so that manifests of others keep what they
//!   need without our knowing their rules; that keeps too much at times, and never too little.
//! - **An image is current** (`--skip-existing`) when its manifest tells the same source manifest and the same options.
//!   Options are told by a hash of their debugging form: it may change with a version, which costs a look at every
//!   layer's record, and a new option cannot be forgotten in it. For a docker archive the config stands in for the
//!   manifest, since it names all layers by diffID.
//! - **Batches.** Exit code 3 if any image failed for damaged bytes, since that is what somebody has to look at; else
//!   1. Images that are interrupted are `left`, not failed.
//! - **No config** (`tar:`, `dir:`): a minimal one is made, for the host's platform, without a time. The diffID of a
//!   directory, which has no tar, is the digest of its metadata image.
//!
//! # Registries
//!
//! - **A tag's manifest is whatever the first place answers that has it**: mirrors in their order, then the registry. Its
//!   digest is compared with the header that names it, and everything below with the digests in it, so a mirror can be
//!   late, but not wrong.
//! - **A layer is streamed and not kept.** A broken connection goes on from its byte, in another place if it must. The
//!   bytes are hashed as they come, so that a stream put together from several answers is judged as a whole.
//! - **A foreign layer** is taken where the registry itself has its bytes; its `urls` are never followed: what is behind
//!   them is no part of the image, and may be anywhere.
//! - **Credentials** go to the registry and to the token server that it names, as every client does, never to where a
//!   redirect leads. A token server without TLS is refused for a registry with it.
//! - **Failures on the way** are code 1, wrong bytes and lengths code 3, also when it was the network that changed them.
//! - **A blob in its right length counts as there** (push, pull): each was hashed when it came there. An export hashes
//!   what it finds, since anybody may write into a layout.
//! - **Hard links into a layout** are only made on request: whoever then writes into a file of the layout writes into the
//!   store.
//!
//! # Merging
//!
//! Runs of consecutive layers become one ([`crate::merge`]), from their metadata images alone.
//!
//! - **The merged layer stacks on anything as the separate layers would.** So it is folded by overlayfs' own rule (the
//!   private module `stack::fold`, which look-ups in lower layers follow too): topmost first, directories are merged
//!   until one is opaque or something else is met. A directory over anything else, a whiteout included, is opaque in the
//!   result, since what is further down would not have shown (W03). Whiteouts stay, also where only a layer of the run
//!   had what they hide: a lower one may have it too (W02).
//! - **Where nothing below shows there are no marks**: below an opaque directory neither whiteouts, which would be listed
//!   (W06), nor opaque directories, which would hide nothing. `--bottom` says that of the whole layer. This makes merging
//!   associative to the byte: whatever is merged first, the same tree comes of it. Devices are numbered by first use in
//!   tree order for the same reason, and not by the layers' own lists, which name blobs that merging may drop.
//! - **An opaque root** hides nothing in overlayfs. It is converted to whiteouts and opaque directories for the names that
//!   the roots below it have, as in a conversion (W01); names that stay come from all layers. The mark stays, for merging
//!   onto others later.
//! - **A directory's attributes** are the topmost's, extended attributes as a whole set (T20, X08): what an overlay shows.
//!   A mark for escaped whiteouts (X03) is such an attribute, and is not added where the topmost directory lacks it.
//!   But a directory that nothing described (`tar:` and `dir:` sources; [`crate::manifest::Unresolved`]) leaves that to
//!   the topmost below it that something did. Nothing further down counts behind a whiteout or something else.
//! - **Hard links**: the names of one inode of one layer stay names of one inode. Those that are hidden do not count for
//!   the link count, while overlayfs tells the lower layer's own.
//! - **Links that were left open** are made where a layer below in the run has the target; the name then joins that inode
//!   with all its names, as an extractor would have it. One whose target a layer of the run hides is an error, as in a
//!   whole image, and so is one that is still open with `--bottom`. Others stay on the list. Contents are not moved behind
//!   symbolic links of lower layers (T12): an undescribed directory over such a link hides it, as in the separate layers.
//!   Convert the layers together for that.
//! - **Refused by name**: attributes of overlayfs that tie a layer to those that it was made on (`redirect`, `metacopy`,
//!   and all others but `opaque` and `origin`), and layers of two xattr namespaces.
//! - **A damaged image is not merged.** Its digest is checked, since its bad bytes would else get a good one.
//! - **What a fleet wants.** A thousand bases and a hundred thousand workspaces share their lower layers, and a merged
//!   layer is shared only by images with the same run. What merging duplicates is metadata images: names, attributes and
//!   small files, a few per cent of an image. Data blobs are linked, so that they stay shared in the store, in every
//!   node's cache and on the wire, whatever is merged. What it saves is mounts, look-ups through layer after layer, and
//!   round trips at start. So the default merges much (3 GiB together), and `--pack`, which gives sharing up, is asked
//!   for. A base of more than that stays a layer of its own, under all that is built on it; where smaller bases should
//!   too, a lower `--merge-under` says so. The separate layers' notes stay, so that the next image that shares them
//!   converts nothing twice.
//!
//! # Hostile layers
//!
//! A layer has at most 2^23 inodes (`--max-inodes`) and four names for each, and 64 GiB of plain bytes
//! (`--max-layer-size`; what is not compressed costs what it is, and is not limited). Memory is about 100 bytes an
//! inode and its name; contents go through a few fixed buffers. Long names, PAX headers and sparse maps have limits of
//! their own ([`crate::tar::Limits`]), expansion has one ([`crate::unpack::Limits`]). Nothing of a layer is ever
//! written under a name that the layer chose: all output is blobs named by digest.
//!
//! # Failures
//!
//! When several layers fail, the lowest is told. Exit code 3 means that bytes are not what they should be (a digest, a
//! checksum, a cut stream, a store's damaged blob), 2 that the command line makes no sense, 1 everything else:
//! unsupported input, a full disk, a name that is not there. A layer that is sound but cannot become a file system (a
//! `..`, a link to a directory) is 1.
