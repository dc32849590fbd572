//! `dsec-convert list`, `inspect` and `verify` on a store with one image.

use converter::convert::{Request, convert_as};
use converter::manifest::digest_of;
use converter::progress::Silent;
use converter::source::Platform;
use fs3_client::Store;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

struct Case {
    _work: tempfile::TempDir,
    store: PathBuf,
    metadata: PathBuf,
    data: PathBuf,
}

impl Case {
    fn new() -> Self {
        let work = tempfile::tempdir().unwrap();
        let source = work.path().join("source");
        fs::create_dir_all(source.join("bin")).unwrap();
        fs::write(source.join("bin/tool"), "t".repeat(9000)).unwrap();
        fs::hard_link(source.join("bin/tool"), source.join("bin/twin")).unwrap();
        fs::write(source.join("note"), "small").unwrap();
        std::os::unix::fs::symlink("bin/tool", source.join("link")).unwrap();
        let path = work.path().join("store");
        let store = Store::create(&path).unwrap();
        let request = Request {
            source: format!("dir:{}", source.display()).parse().unwrap(),
            platform: Platform::host(),
            options: converter::layer::Options::default(),
            jobs: 1,
            registry: Default::default(),
            dedup: None,
        };
        let image = convert_as(&"team/app:1".parse().unwrap(), &request, &store, &Silent).unwrap().image;
        let path_of = |blob| store.local_dir().unwrap().blob_path(&digest_of(blob).unwrap());
        let layer = &image.layers[0];
        Self { metadata: path_of(&layer.metadata), data: path_of(&layer.data[0]), store: path, _work: work }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
        command.args(arguments.iter().map(|a| match *a {
            "STORE" => self.store.as_os_str(),
            "METADATA" => self.metadata.as_os_str(),
            other => other.as_ref(),
        }));
        command.stdin(Stdio::null()).output().unwrap()
    }

    fn good(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn bad(&self, arguments: &[&str], code: i32) -> String {
        let output = self.run(arguments);
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        text
    }
}

fn overwrite(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn list_shows_each_image() {
    let case = Case::new();
    let text = case.good(&["list", "STORE"]);
    assert!(text.starts_with("IMAGE ") && text.contains("\nteam/app:1 "), "{text}");
    let json: Value = serde_json::from_str(&case.good(&["list", "STORE", "--json"])).unwrap();
    let image = &json["images"][0];
    assert_eq!((&image["name"], &image["tag"], &image["layers"]), (&"team/app".into(), &"1".into(), &1.into()));
    assert_eq!(image["data_bytes"], fs::metadata(&case.data).unwrap().len());
}

#[test]
fn inspect_shows_layers_superblock_and_tree() {
    let case = Case::new();
    let text = case.good(&["inspect", "STORE", "team/app:1"]);
    assert!(text.contains("layer 0") && text.contains("chunk table"), "{text}");
    let text = case.good(&["inspect", "METADATA"]);
    assert!(
        text.contains("least kernel  5.16") && text.contains("device-table") && text.contains("device 1"),
        "{text}"
    );

    let lines = case.good(&["inspect", "STORE", "team/app:1", "--tree", "--json"]);
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1 + 6, "the image, and a line for each name");
    let find = |path: &str| lines.iter().find(|l| l["path"] == path).unwrap();
    assert_eq!((&find("bin/tool")["nlink"], &find("bin/tool")["size"]), (&2.into(), &9000.into()));
    assert_eq!(find("bin/tool")["extents"][0]["device"], 1);
    assert_eq!(find("bin/twin")["link"], true);
    assert_eq!(find("link")["target"], "bin/tool");
    assert_eq!(find("note")["layout"], "flat-inline");
    let text = case.good(&["inspect", "METADATA", "--tree"]);
    assert!(text.contains(" /link -> bin/tool"), "{text}");
}

#[test]
fn verify_exits_with_3_and_names_each_finding() {
    let case = Case::new();
    assert!(case.good(&["verify", "STORE", "team/app:1", "--deep"]).trim_end().ends_with(": sound"));
    overwrite(&case.data, |bytes| bytes[5000] ^= 1);
    let text = case.bad(&["verify", "STORE", "team/app:1", "--deep"], 3);
    assert!(text.contains("the blob is corrupt") && text.contains("does not match the chunk table"), "{text}");
    let output = case.run(&["verify", "STORE", "team/app:1", "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &json["sound"]), (Some(3), &false.into()));
    assert_eq!(json["report"]["problems"].as_array().unwrap().len(), 1);
}

#[test]
fn mistakes_get_a_code_and_a_hint() {
    let case = Case::new();
    assert!(case.bad(&["verify", "STORE", "team/none:1"], 1).contains("hint: `dsec-convert list "));
    assert!(case.bad(&["list", "/nonexistent"], 1).contains("is not a store"));
    case.bad(&["inspect", "STORE", "Not A Name"], 2);
    assert!(case.bad(&["inspect", "STORE"], 2).contains("name the image in it as NAME:TAG"));
    assert!(case.bad(&["inspect", "/bin/sh"], 3).contains("not an EROFS image"));
    overwrite(&case.metadata, |bytes| bytes[1100] ^= 1);
    assert!(case.bad(&["inspect", "METADATA"], 3).contains("superblock: checksum: stored"));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let case = Case::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_dsec-convert"))
        .args(["inspect".as_ref(), case.metadata.as_os_str()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}
