//! Named cases of merging: each stack is mounted as separate layers, with every run of it merged, and over lowers.

use crate::support::cases;
use crate::support_cases::{
    BOTH, Case, as_umoci, assert_one_inode, assert_same_overlay, assert_text, mount, node, paths, xattrs,
};
use crate::support_merge::{BOTTOM, all_runs, assert_associative, identity, layers, merge, try_merge};
use converter::layer::{BlobRef, Record};
use converter::manifest::{Layer, OverlayXattrs, Unresolved, annotation};
use converter::merge::{MergeError, Options, merge_layers};
use fixtures::content::Content;
use fixtures::model::{Kind, Meta, Model};
use fixtures::tree::{Snapshot, diff};
use fixtures::{mounts, require};
use proptest::prelude::*;
use std::process::Command;

/// Layers that lie below a stack: nothing, everything that it may hide, other types, links.
const LOWERS: [&str; 4] = [
    "f unrelated",
    "f d/below \"below\"\nf d/a/below\nf x \"below\"\nf dir/old.txt \"below\"\nf root/dirA/below\nf f \"below\"\nf a/below",
    "f d \"a file\"\ns dir -> /etc\nd x/ 0711\nf x/inside\nd f/\nf f/inside\nf root",
    "s d -> elsewhere\nd elsewhere/\nf elsewhere/below\ns x -> y\ns a -> /b\nf b/below",
];

/// The stack itself as umoci unpacks it, whatever is merged; and the same over all lowers.
#[track_caller]
fn check(stack: &[&str]) -> Snapshot {
    check_in(OverlayXattrs::Trusted, stack)
}

#[track_caller]
fn check_in(overlay: OverlayXattrs, stack: &[&str]) -> Snapshot {
    let case = Case::in_namespace(overlay, stack);
    let all = layers(&case.converted);
    let records: Vec<&Record> = case.converted.layers.iter().map(|layer| &layer.record).collect();
    let tree = case.tree();
    assert_eq!(diff(&case.umoci().unwrap(), &tree, &as_umoci()), Vec::<String>::new(), "umoci | {stack:?}");
    assert_associative(&case.store, &all, Options::default());
    let bottom = assert_associative(&case.store, &all, BOTTOM);
    assert_eq!(bottom.counts.whiteouts + bottom.counts.opaques, 0);
    let alone = mount(&case.store, &[&bottom], overlay, |root| Snapshot::of(root).unwrap());
    assert_same_overlay(&tree, &alone);
    let options = converter::layer::Options { overlay, ..converter::layer::Options::default() };
    let mut below: Vec<Option<Record>> = vec![None];
    for script in LOWERS {
        let source = mounts::scratch();
        let file = source.path().join("lower.tar");
        std::fs::write(&file, fixtures::tar::build(script)).unwrap();
        let source = format!("tar:{}", file.display());
        let lower = crate::support::convert_by(&case.store, &source, 1, options).unwrap();
        below.push(Some(lower.layers[0].record.clone()));
    }
    for run in all_runs(all.len()) {
        let merged = merge(&case.store, &all[run.clone()], Options::default());
        let mut with = records.clone();
        with.splice(run.clone(), [&merged]);
        for lower in &below {
            let stacked = |top: &[&Record]| {
                let all: Vec<&Record> = lower.iter().chain(top.iter().copied()).collect();
                mount(&case.store, &all, overlay, |root| Snapshot::of(root).unwrap())
            };
            assert_same_overlay(&stacked(&records), &stacked(&with));
        }
    }
    tree
}

#[test]
fn privileged_merged_w02_opaque_lost_in_three_layers() {
    if !require::mounts() {
        return;
    }
    let (old, new) = ("f dir/old.txt \"old\"", "f dir/new.txt \"new\"");
    for overlay in BOTH {
        for stack in [
            &[old, "o dir", new][..],
            &[old, "o dir", "f elsewhere", new],
            &[old, "f elsewhere\no dir", "w elsewhere", new],
            &[old, "o dir\nf dir/between.txt", "o dir", new],
            &[old, "d dir/ 0711\no dir", "d other/", "d dir/ 0700\nf dir/new.txt \"new\""],
        ] {
            let tree = check_in(overlay, stack);
            assert_text(&tree, "dir/new.txt", "new");
            assert_eq!(node(&tree, "dir").children.len(), 1, "{stack:?}");
        }
    }
}

#[test]
fn privileged_merged_w03_whiteouts_are_of_their_layer() {
    if !require::mounts() {
        return;
    }
    assert_text(&check(&["f f \"1\"", "w f", "f f \"3\""]), "f", "3");
    assert_eq!(paths(&check(&["f d/a", "o d", "f d/b"])), ["d", "d/b"]);
    // A directory removed and made again is opaque, so that what is further down stays hidden.
    let tree = check(&["d d/ 0700\nf d/a/1", "w d", "d d/ 0711\nf d/b"]);
    assert_eq!(paths(&tree), ["d", "d/b"]);
    assert_eq!(node(&tree, "d").mode, 0o711);
    check(&["f x", "w x", "d x/\nf x/1", "w x", "s x -> y", "w x", "d x/ 0700\nf x/2"]);
    // What only a middle layer had is still hidden: a lower one may have it too.
    check(&["f other", "f x \"middle\"", "w x"]);
    // Whiteouts in what is opaque, and opaque in opaque.
    check(&["f d/a/1\nf d/2", "o d\nf d/a/3", "o d/a\nw d/a/3\nf d/a/4", "w d/a/4"]);
    check(&["f d/a/1", "o d\nd d/ 0750", "o d\nf d/b/1", "w d/b"]);
}

#[test]
fn privileged_merged_w04_whiteout_below_a_parent_that_was_removed() {
    if !require::mounts() {
        return;
    }
    let upper = "w root/dirA/dirB/fileA\nd root/\nd root/dirA/\nf root/dirA/fileB";
    let tree = check(&["f root/dirA/dirB/fileA", "w root/dirA", upper]);
    assert_eq!(paths(&tree), ["root", "root/dirA", "root/dirA/fileB"]);
}

#[test]
fn privileged_merged_opaque_roots() {
    if !require::mounts() {
        return;
    }
    for stack in [
        &["f old\nf d/old", "f d/new\no ."][..],
        &["f a\nf d/1\nf x", "f b\nw x", "f d/2\no .", "f e"],
        &["f a\nd d/ 0700\nf d/1", "o .\nf d/2", "o .\nf e", "f d/3"],
    ] {
        let case = Case::new(stack);
        let all = layers(&case.converted);
        let tree = case.tree();
        assert_associative(&case.store, &all, Options::default());
        let bottom = assert_associative(&case.store, &all, BOTTOM);
        let merged = merge(&case.store, &all, Options::default());
        for record in [&bottom, &merged] {
            let alone = mount(&case.store, &[record], OverlayXattrs::Trusted, |root| Snapshot::of(root).unwrap());
            assert_same_overlay(&tree, &alone);
        }
    }
}

#[test]
fn privileged_merged_t11_types_change() {
    if !require::mounts() {
        return;
    }
    let tree = check(&["f a/x\nf a/y/z\nf f", "s a -> /b\nd f/\nf f/n"]);
    assert_eq!(paths(&tree), ["a", "f", "f/n"]);
    check(&["s a -> b", "d a/\nf a/1", "f a \"file\"", "d a/ 0700\nf a/2", "p a"]);
    check(&["f d/1", "f d \"file\"", "d d/\nf d/2"]);
}

#[test]
fn privileged_merged_t20_the_topmost_directory_counts() {
    if !require::mounts() {
        return;
    }
    let tree = check(&["d d/ 0700 uid=1 mtime=1\nf d/a", "d d/ 0711 uid=2 mtime=2", "d d/ 0755 uid=3 mtime=3\nf d/b"]);
    let d = node(&tree, "d");
    assert_eq!((d.mode, d.uid, d.mtime.secs), (0o755, 3, 3));
    // Without an entry of its own it is what a lower one is.
    let tree = check(&["d d/ 0700 uid=1 mtime=1\nf d/a", "f d/b", "w d/a\nf d/c"]);
    assert_eq!((node(&tree, "d").mode, node(&tree, "d").uid), (0o700, 1));
}

#[test]
fn privileged_merged_l08_groups_across_many_directories() {
    if !require::mounts() {
        return;
    }
    let mut lower = "f first \"shared\"\n".to_owned();
    for n in 0..200 {
        lower += &format!("d d{n:03}/\nd d{n:03}/sub/\nh d{n:03}/link -> first\n");
    }
    let upper: String = (0..200).step_by(3).map(|n| format!("w d{n:03}/link\nf d{n:03}/sub/x\n")).collect();
    let case = Case::new(&[&lower, &upper]);
    let record = merge(&case.store, &layers(&case.converted), BOTTOM);
    let tree = mount(&case.store, &[&record], OverlayXattrs::Trusted, |root| Snapshot::of(root).unwrap());
    let names: Vec<String> = std::iter::once("first".to_owned())
        .chain((0..200).filter(|n| n % 3 != 0).map(|n| format!("d{n:03}/link")))
        .collect();
    assert_one_inode(&tree, &names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(node(&tree, "first").nlink, 134);
    assert_eq!(node(&tree, "d001/link").nlink, 134);
}

#[test]
fn privileged_merged_links_partly_hidden() {
    if !require::mounts() {
        return;
    }
    let large = "f a size=50000 fill=random:1\nh b -> a\nh c -> a\nf d/x size=10\nh d/y -> d/x";
    let tree = check(&[large, "w a\nf d/x \"other\"", "w nothing"]);
    assert_one_inode(&tree, &["b", "c"]);
    // A link into a lower layer, and what the upper one makes of it.
    check(&["f a size=50000 fill=random:1", "h b -> a", "w a", "f b \"new\""]);
    check(&["f a size=50000 fill=random:1", "h b -> a\nh e/c -> a", "d e/ 0700"]);
}

#[test]
fn privileged_merged_x07_x08_attributes() {
    if !require::mounts() {
        return;
    }
    // Files with and without, values shared and not, larger files too.
    let files: String = (0..40)
        .map(|n| {
            let size = if n % 5 == 0 { 20_000 } else { n * 10 };
            let file = format!("f d/f{n:02} size={size} fill=random:{n}\n");
            match n % 3 {
                0 => file,
                1 => file + "x user.shared=\"the same long value in many files\"\n",
                _ => file + &format!("x user.own=\"value {n}\"\nx trusted.t=1\n"),
            }
        })
        .collect();
    let (lower, upper) = ("d d/\nx user.a=1\nx user.b=1\nf d/z\n", "d d/ 0700\nx user.b=3\nx user.c=3\n");
    let tree = check(&[lower, &format!("d d/\nx user.a=2\n{files}"), upper]);
    assert_eq!(xattrs(&tree, "d"), [("user.b".to_owned(), "3".to_owned()), ("user.c".to_owned(), "3".to_owned())]);
    assert_eq!(xattrs(&tree, "d/f00"), []);
    assert_eq!(xattrs(&tree, "d/f02").len(), 2);
}

#[test]
fn privileged_merged_x03_escaped_whiteouts_are_kept() {
    if !require::mounts() {
        return;
    }
    let case = Case::new(&["c d/x 0:0\nf d/y", "f e\nw d/y", "f d/z"]);
    let all = layers(&case.converted);
    let tree = case.tree();
    let merged = assert_associative(&case.store, &all, Options::default());
    let alone = mount(&case.store, &[&merged], OverlayXattrs::Trusted, |root| Snapshot::of(root).unwrap());
    // As far as they show through the mount, too.
    let options = fixtures::tree::Compare { ignore_xattrs: Vec::new(), ..fixtures::tree::Compare::overlay() };
    assert_eq!(diff(&tree, &alone, &options), Vec::<String>::new());
    assert!(
        xattrs(&alone, "d/x").iter().any(|(name, _)| name == "trusted.overlay.whiteout"),
        "{:?}",
        xattrs(&alone, "d/x")
    );
}

fn tar_layer(case: &Case, script: &str) -> Layer {
    let dir = mounts::scratch();
    let file = dir.path().join("layer.tar");
    std::fs::write(&file, fixtures::tar::build(script)).unwrap();
    let source = format!("tar:{}", file.display());
    let options = converter::layer::Options::default();
    crate::support::convert_by(&case.store, &source, 1, options).unwrap().layers[0].record.to_layer()
}

/// Layers that were converted alone leave links and descriptions to those below; merging finds them.
#[test]
fn privileged_merged_l02_what_was_left_open_is_found() {
    if !require::mounts() {
        return;
    }
    let case = Case::new(&[
        "d ./ 0755\nd etc/ 0700 uid=5 mtime=3\nf etc/a size=30000 fill=random:1 mtime=4\ns lib -> etc\nd gone/\nf gone/f",
    ]);
    let base = case.record(0).to_layer();
    let upper = tar_layer(&case, "h etc/b -> etc/a\nh c -> lib/a\nf etc/new/x");
    assert_eq!(upper.unresolved().unwrap().links.len(), 2);
    assert!(upper.unresolved().unwrap().implied.len() >= 2);
    let top = tar_layer(&case, "w gone\nh etc/e -> c\nh other/d -> nowhere");
    let record = assert_associative(&case.store, &[base.clone(), upper.clone(), top.clone()], Options::default());
    // One link is still open, and stays on the list; nothing else is left to lower layers.
    let open = vec![(hex::encode("other/d"), hex::encode("nowhere"))];
    let implied: Vec<u32> = record.unresolved.implied.clone();
    assert_eq!(record.unresolved, Unresolved { links: open, implied: implied.clone(), ..Unresolved::default() });
    let tree = mount(&case.store, &[&record], OverlayXattrs::Trusted, |root| Snapshot::of(root).unwrap());
    assert_one_inode(&tree, &["c", "etc/a", "etc/b", "etc/e"]);
    assert_eq!((node(&tree, "etc").mode, node(&tree, "etc").uid, node(&tree, "etc").mtime.secs), (0o700, 5, 3));
    assert!(tree.find(b"gone").is_none());
    // `etc/new` and `other` were never described.
    assert_eq!(implied.len(), 2, "{implied:?}");
    // Where nothing can be below, an open link is a missing file.
    let error = try_merge(&case.store, &[base.clone(), top.clone()], BOTTOM).unwrap_err().to_string();
    assert!(error.contains("`etc/e`") && error.contains("hard link to `c`"), "{error}");
    // And where what it names was removed, it can be nowhere.
    let removed = tar_layer(&case, "w etc/a");
    let error = try_merge(&case.store, &[base, removed, upper], Options::default()).unwrap_err().to_string();
    assert!(error.contains("`c`") && error.contains("hard link to `lib/a`"), "{error}");
}

/// A link that stays open means what was below its own layer, whatever came later in the run: merging step by step gives
/// what merging at once gives.
#[test]
fn open_links_mean_the_same_in_any_steps() {
    for scripts in [
        // The target comes again above the link.
        &["f f \"old\"", "h x -> f", "f f \"new\""][..],
        // It is removed above it.
        &["f f \"old\"", "h x -> f", "w f"],
        // A link to a link, with names in either order.
        &["f f \"old\"", "h h -> f", "h a -> h"],
        &["f f \"old\"", "h h -> f", "h x -> h"],
        &["f f \"old\"", "h h -> f", "h x -> h\nw h", "f f \"new\""],
        // A link to a link that is gone, and to one that is something else by then.
        &["f f \"old\"\nf h \"other\"", "h h -> f", "f h \"newer\"", "h a -> h"],
    ] {
        let case = Case::new(&["f unrelated"]);
        let all: Vec<Layer> = scripts.iter().map(|script| tar_layer(&case, script)).collect();
        let record = assert_associative(&case.store, &all, Options::default());
        assert_eq!(record.unresolved.links, [], "{scripts:?}");
    }
    // What was removed before the link was made is nowhere.
    let case = Case::new(&["f unrelated"]);
    let all = ["f f \"old\"", "h h -> f", "w h", "h a -> h"].map(|script| tar_layer(&case, script));
    assert!(try_merge(&case.store, &all, Options::default()).unwrap_err().to_string().contains("hard link to `h`"));
}

/// Random layers of few names, each converted alone. Where a merge in steps cannot be right it says so.
#[test]
fn random_open_links_mean_the_same_in_any_steps() {
    let name = || proptest::sample::select(vec!["a", "b", "c", "d/a", "d/b", "s/a"]);
    let line = prop_oneof![
        (name(), 0..100u32).prop_map(|(name, text)| format!("f {name} \"{text}\"")),
        (name(), name()).prop_filter("itself", |(a, b)| a != b).prop_map(|(link, to)| format!("h {link} -> {to}")),
        name().prop_map(|name| format!("w {name}")),
        Just("s s -> d".to_owned()),
    ];
    let layer = proptest::collection::vec(line, 1..4).prop_map(|lines| lines.join("\n"));
    let outcomes = std::cell::RefCell::new((0, 0, 0));
    proptest!(cases(150), |(scripts in proptest::collection::vec(layer, 3..5))| {
        let case = Case::new(&["f unrelated"]);
        let convert = |script: &String| Case::of_tar(&fixtures::tar::build(script)).is_ok();
        prop_assume!(scripts.iter().all(convert));
        let all: Vec<Layer> = scripts.iter().map(|script| tar_layer(&case, script)).collect();
        let Ok(flat) = try_merge(&case.store, &all, Options::default()) else {
            outcomes.borrow_mut().0 += 1;
            return Ok(());
        };
        for cut in 1..all.len() - 1 {
            let steps = try_merge(&case.store, &all[cut..], Options::default()).and_then(|upper| {
                let mut stack = all[..cut].to_vec();
                stack.push(upper.to_layer());
                try_merge(&case.store, &stack, Options::default())
            });
            match steps {
                Ok(steps) => {
                    outcomes.borrow_mut().1 += 1;
                    prop_assert_eq!(identity(&steps), identity(&flat), "cut at {} of {:?}", cut, scripts);
                }
                Err(error) => {
                    outcomes.borrow_mut().2 += 1;
                    prop_assert!(error.to_string().contains("merge the layers at once"), "{} | {:?}", error, scripts);
                }
            }
        }
    });
    let (refused, same, buried) = outcomes.into_inner();
    assert!(same > 3 * (refused + buried), "{refused} refused, {same} the same, {buried} cannot be known");
}

/// The table of devices may end anywhere in a block.
#[test]
fn any_number_of_blobs() {
    let place = crate::support::Place::new();
    let layer = |number: u64| {
        let mut model = Model::new();
        let content = Content::Random { seed: number, size: 5000 };
        model.put(format!("f{number}").as_bytes(), Kind::Regular(content), Meta::new(0o644));
        model.put(
            format!("small{number}").as_bytes(),
            Kind::Regular(Content::Random { seed: number, size: 50 }),
            Meta::new(0o644),
        );
        model.to_layer()
    };
    let stack: Vec<_> = (0..130).map(layer).collect();
    let converted = place.convert(&place.layout_of(&stack)).unwrap();
    let all = layers(&converted);
    for count in [2, 22, 23, 24, 25, 26, 53, 54, 55, 56, 57, 87, 88, 118, 119, 120, 130] {
        let record = merge(&place.store, &all[..count], BOTTOM);
        assert_eq!(record.data.len(), count);
        let model = Snapshot::of_model(&Model::merged(&stack[..count]));
        let differs = crate::support::reader_differs(&place.store, &record, &model);
        assert_eq!(differs, Vec::<String>::new(), "{count} blobs");
        if require::mounts() {
            let found = mount(&place.store, &[&record], OverlayXattrs::Trusted, |root| Snapshot::of(root).unwrap());
            assert_eq!(
                diff(&model, &found, &fixtures::tree::Compare::overlay()),
                Vec::<String>::new(),
                "{count} blobs"
            );
        }
    }
}

#[test]
fn layers_of_two_namespaces_are_not_merged() {
    let case = Case::new(&["f a"]);
    let mut all = layers(&case.converted);
    let user = Case::in_namespace(OverlayXattrs::User, &["f a", "w a"]);
    all.extend(layers(&user.converted));
    let error = merge_layers(&all, 4, Options::default(), &case.store).unwrap_err();
    assert!(matches!(error, MergeError::Namespaces { layer: 5, .. }), "{error}");
    assert!(error.to_string().contains("`user.overlay.*`"), "{error}");
}

/// Another tool's image of an overlay's upper directory may have attributes that mean something only over the layers it
/// was made on.
#[test]
fn attributes_that_tie_a_layer_to_others_are_refused_by_name() {
    let case = Case::in_namespace(OverlayXattrs::User, &["f d/file \"x\"", "f other"]);
    let all = layers(&case.converted);
    for (name, value, file) in [("redirect", "/elsewhere", "d"), ("metacopy", "", "d/file"), ("impure", "y", "d")] {
        let made = tempfile::tempdir_in("/var/tmp").unwrap();
        let dir = made.path().join("dir");
        std::fs::create_dir_all(dir.join("d")).unwrap();
        std::fs::write(dir.join("d/file"), "x").unwrap();
        let attribute = format!("user.overlay.{name}");
        rustix::fs::setxattr(dir.join(file), &attribute, value.as_bytes(), rustix::fs::XattrFlags::empty()).unwrap();
        let image = made.path().join("image");
        let mkfs = Command::new("mkfs.erofs").arg(&image).arg(&dir).output().unwrap();
        assert!(mkfs.status.success(), "{mkfs:?}");
        let published = case.store.publish_bytes(&std::fs::read(&image).unwrap()).unwrap();
        let mut record = case.record(0).clone();
        record.metadata = BlobRef { digest: published.digest, size: published.size };
        record.data.clear();
        record.chunk_tables.clear();
        let error = merge_layers(&[record.to_layer(), all[1].clone()], 3, Options::default(), &case.store).unwrap_err();
        let said = error.to_string();
        assert!(said.starts_with("layer 3 (sha256:") && said.contains(&format!("`{attribute}`")), "{said}");
        assert!(!error.is_corrupt(), "{said}");
    }
}

/// What was merged says of what, and takes no more room than it must.
#[test]
fn merged_layers_tell_their_parts_and_link_their_blobs() {
    let large = |seed: u32| format!("f big{seed} size=100000 fill=random:{seed}\n");
    let case = Case::new(&[&large(1), &large(2), &(large(3) + "w big2"), "f small \"x\""]);
    let all = layers(&case.converted);
    let blobs = std::fs::read_dir(case.store.local_dir().unwrap().root().join("blobs/sha256")).unwrap().count();
    let record = merge(&case.store, &all, Options::default());
    let layer = record.to_layer();
    // One new blob: the metadata image. The blob of what was removed is no device.
    assert_eq!(
        std::fs::read_dir(case.store.local_dir().unwrap().root().join("blobs/sha256")).unwrap().count(),
        blobs + 1
    );
    assert_eq!(record.data, [case.record(0).data[0], case.record(2).data[0]]);
    assert_eq!(record.chunk_tables.len(), 2);
    let annotations = layer.metadata.annotations().clone().unwrap();
    let digests = |of: &dyn Fn(&Record) -> Option<fs3_client::Digest>| {
        let all = (0..4).map(|n| of(case.record(n)).unwrap().to_string());
        all.collect::<Vec<_>>().join(",")
    };
    assert_eq!(annotations[annotation::DIFF_ID], digests(&|r| r.diff_id));
    assert_eq!(annotations[annotation::SOURCE_DIGEST], digests(&|r| r.source));
    // Merged again, it is a part like any other.
    let again = merge(&case.store, &[layer.clone(), all[0].clone()], Options::default());
    assert_eq!(again.parts.len(), 5);
    // The same run again costs nothing.
    let (second, reused) = merge_layers(&all, 0, Options::default(), &case.store).unwrap();
    assert!(reused && second == record);
    let (_, reused) = merge_layers(&all, 0, BOTTOM, &case.store).unwrap();
    assert!(!reused);
    // Packed, there is one blob, with a chunk table of its own.
    let packed = merge(&case.store, &all, crate::support_merge::PACK);
    assert_eq!((packed.data.len(), packed.chunk_tables.len()), (1, 1));
    assert_eq!(packed.data[0].size, 2 * 102_400);
}
