//! Stacks of random layers: what an overlay over the converted ones shows is what umoci makes of the image, layer upon
//! layer on one disk, and what the model says.
//!
//! What differs, and must:
//! - an xattr with an empty value is kept; umoci, by Go's archive/tar, loses it;
//! - umoci gives some directories the present time, when a later layer removes what is in them;
//! - link counts: overlayfs tells those of the layer that a file is in;
//! - a hard link to one of several names that a lower layer has for a file joins the new name with the one that it
//!   links to, not with the others, which the lower layer alone has (so the strategy links to single names only).

use crate::support::{Place, cases};
use fixtures::arbitrary::{Limits, stacks};
use fixtures::model::{Layer, Model};
use fixtures::oci;
use fixtures::tree::{Compare, Snapshot, diff};
use fixtures::{mounts, require};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

const NOTHING: Vec<String> = Vec::new();

pub(crate) fn check_stack(layers: &[Layer]) -> Result<(), TestCaseError> {
    let place = Place::new();
    let converted = place.convert(&place.layout_of(layers)).unwrap();
    let (overlay, _layers) = place.mount_all(&converted);
    let found = Snapshot::of(overlay.path()).unwrap();
    let options = if layers.len() == 1 { Compare::exact() } else { Compare::overlay() };
    let model = Snapshot::of_model(&Model::merged(layers));
    prop_assert_eq!(diff(&model, &found, &options), NOTHING, "the model | the overlay");
    let unpacked = mounts::umoci_unpack(&place.path("oci"), "t").unwrap();
    let unpacked = Snapshot::of(&unpacked.rootfs()).unwrap();
    // umoci touches some directories again when a later layer removes what is in them; the model judged their times.
    let options = Compare { empty_xattrs: false, dir_mtime: false, ..options };
    prop_assert_eq!(diff(&unpacked, &found, &options), NOTHING, "umoci | the overlay");
    Ok(())
}

#[test]
fn privileged_stacks_are_what_umoci_unpacks() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(60), |(layers in stacks(Limits::small(), 5))| check_stack(&layers)?);
    });
}

/// Layers without entries for directories that stay as they are, and with hard links into those below.
#[test]
fn privileged_loose_stacks_are_what_umoci_unpacks() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(60), |(layers in stacks(Limits::small_and_loose(), 5))| check_stack(&layers)?);
    });
}

#[test]
fn privileged_large_stacks_are_what_umoci_unpacks() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let limits = Limits { entries: 150, depth: 15, file: 300_000, ..Limits::small() };
        proptest!(cases(10), |(layers in stacks(limits, 4))| check_stack(&layers)?);
        let limits = Limits { loose: true, ..limits };
        proptest!(cases(10), |(layers in stacks(limits, 4))| check_stack(&layers)?);
    });
}

/// Directories of the bottom layer, and every way to say them: itself, and through symbolic links.
const WAYS: [(&str, &[&str]); 3] = [
    ("usr/lib", &["usr/lib", "lib", "lib64", "usr/lib64", "var/root/lib"]),
    ("usr/share/doc", &["usr/share/doc", "doc", "var/root/doc", "docs"]),
    ("var", &["var", "usr/var", "doc/var"]),
];

const BOTTOM: &str = "
    d ./ 0755 mtime=1
    d usr/ 0755 mtime=2
    d usr/lib/ 0750 uid=7 mtime=3
    x user.a=1
    d usr/share/ mtime=4
    d usr/share/doc/ 0700 gid=8 mtime=5
    d var/ 0711 mtime=6
    s lib -> usr/lib
    s lib64 -> /lib
    s usr/lib64 -> lib
    s doc -> usr/share/doc
    s docs -> var/root/docs2
    s docs2 -> ./usr/../doc
    s var/root -> ..
    s usr/var -> /../var
    s usr/share/doc/var -> ../../../var
";

/// What a layer does in one of the directories, by one of its ways.
#[derive(Debug, Clone)]
struct Step {
    layer: usize,
    directory: usize,
    way: prop::sample::Index,
    act: u8,
    victim: prop::sample::Index,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (1..4_usize, 0..WAYS.len(), any::<prop::sample::Index>(), 0..6_u8, any::<prop::sample::Index>());
    let step = step.prop_map(|(layer, directory, way, act, victim)| Step { layer, directory, way, act, victim });
    prop::collection::vec(step, 1..16)
}

/// The layers' scripts. No two steps of a layer touch the same name, so their order does not matter.
fn scripts(steps: &[Step]) -> Vec<String> {
    let mut scripts = vec![BOTTOM.to_owned()];
    let mut below: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    for layer in 1..4 {
        let mut script = String::new();
        let mut new: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
        for (number, step) in steps.iter().enumerate().filter(|(_, step)| step.layer == layer) {
            let ways = WAYS[step.directory].1;
            let way = ways[step.way.index(ways.len())];
            let name = format!("n{number}");
            let there = below.entry(step.directory).or_default();
            if step.act >= 4 && !there.is_empty() {
                let victim = there.iter().nth(step.victim.index(there.len())).unwrap().clone();
                there.remove(&victim);
                if step.act == 4 {
                    writeln!(script, "w {way}/{victim}").unwrap();
                } else {
                    writeln!(script, "f {way}/{victim} \"again by {number}\" mtime=9").unwrap();
                }
                continue;
            }
            new.entry(step.directory).or_default().insert(name.clone());
            match step.act {
                0 => writeln!(script, "d {way}/{name}/ 0711 mtime=7\nf {way}/{name}/f \"in {number}\" mtime=8"),
                1 => writeln!(script, "f {way}/{name} size=9000 fill=random:{number} mtime=8"),
                2 => writeln!(script, "s {way}/{name} -> elsewhere"),
                _ => writeln!(script, "f {way}/{name} \"text of {number}\" mtime=8"),
            }
            .unwrap();
        }
        for (directory, names) in new {
            below.entry(directory).or_default().extend(names);
        }
        scripts.push(script);
    }
    scripts
}

/// Entries behind symbolic links that a lower layer has, as every base with `/lib -> usr/lib` gets them.
#[test]
fn privileged_paths_through_lower_symlinks_lead_where_umoci_goes() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(60), |(steps in steps())| {
            let scripts = scripts(&steps);
            let layers: Vec<_> = scripts.iter().map(|script| oci::Layer::text(script)).collect();
            let place = Place::new();
            let converted = place.convert(&place.layout(&layers)).unwrap();
            let (overlay, _layers) = place.mount_all(&converted);
            let found = Snapshot::of(overlay.path()).unwrap();
            let unpacked = mounts::umoci_unpack(&place.path("oci"), "t").unwrap();
            let unpacked = Snapshot::of(&unpacked.rootfs()).unwrap();
            // Symbolic links have no time of their own in the scripts, nor has what a script leaves to a lower layer.
            let found = diff(&unpacked, &found, &Compare::overlay());
            prop_assert_eq!(found, NOTHING, "umoci | the overlay, of {:#?}", &scripts[1..]);
        });
    });
}
