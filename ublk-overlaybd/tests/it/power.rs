//! The power of a whole machine is cut: what was synced to a device is there after the next boot.

use fixtures::require;
use fixtures::vm::{Kernel, Machine, Work};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// For a boot and its work, without hardware's help.
const LIMIT: Duration = Duration::from_secs(240);

/// What both boots begin with: the disk, and a daemon. `/dev/vdb` is the second disk.
const BEGIN: &str = r#"
share=/run/dsec/share
mkdir -p /run/disk /run/mnt
mount -t ext4 /dev/vdb /run/disk
RUST_LOG=info "$PROGRAM" serve --state /run/disk/state --socket /run/daemon.sock 2>"$share/daemon" &
for i in $(seq 600); do "$PROGRAM" events --socket /run/daemon.sock 2>/dev/null | grep -q '"ready"' && break; sleep .1; done
mkdir -p /run/disk/vm
node=$("$PROGRAM" add vm --socket /run/daemon.sock --chain /run/disk/vm/chain --size 256MiB)
content() { seq "$1" 7 40000 | head -c 60000; }
"#;

/// Writes and syncs files until the power is cut; says after each that it is synced. Every tenth time, what was written so
/// far is sealed, and a file goes.
const WRITES: &str = r#"
[ -e /run/disk/made ] || { mkfs.ext4 -q -E nodiscard "$node"; : >/run/disk/made; sync -f /run/disk; }
mount "$node" /run/mnt
n=0
while :; do
    n=$((n + 1))
    content $n >/run/mnt/f$n
    if [ $((n % 10)) = 0 ]; then "$PROGRAM" snapshot vm --socket /run/daemon.sock; rm /run/mnt/f$((n - 5)); fi
    sync /run/mnt/f$n /run/mnt
    echo $n >"$share/synced.part"
    mv "$share/synced.part" "$share/synced"
done
"#;

/// Looks whether all that was synced is there.
const LOOKS: &str = r#"
grep -q 'started anew' "$share/daemon" || { echo 'the daemon noticed no boot'; exit 1; }
mount "$node" /run/mnt
for n in $(seq "$SYNCED"); do
    if [ $((n % 10)) = 5 ] && [ $((n + 5)) -le "$SYNCED" ]; then
        [ ! -e /run/mnt/f$n ] || { echo "f$n came back"; exit 1; }
    else
        content $n | cmp - /run/mnt/f$n || exit 1
    fi
done
umount /run/mnt
e2fsck -fn "$node" || exit 1
rm -f /run/disk/made
"$PROGRAM" rm vm --socket /run/daemon.sock
rm -rf /run/disk/vm
umount /run/disk || umount -l /run/disk
"#;

fn work(script: &str, disk: &Path, synced: u64) -> Work {
    let program = Path::new(env!("CARGO_BIN_EXE_ublk-overlaybd"));
    Work {
        main: Some(format!("#!/bin/bash\nset -e\n{BEGIN}{script}")),
        environment: vec![
            ("PROGRAM".to_owned(), program.display().to_string()),
            ("SYNCED".to_owned(), synced.to_string()),
        ],
        visible: vec![program.parent().unwrap().to_owned()],
        disks: vec![disk.to_owned()],
        ..Work::default()
    }
}

#[test]
fn guest_power_cut_loses_nothing_that_was_synced() {
    let machine = match Machine::find(Kernel::Stock) {
        Ok(machine) => machine,
        Err(error) => {
            require::not_run("vm", &error.to_string());
            return;
        }
    };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let disk = dir.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 30).unwrap();
    assert!(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk).status().unwrap().success());
    // Two cuts, at different moments between two syncs.
    for (after, more) in [(12, 3), (25, 130)] {
        let mut running = machine.boot(&work(WRITES, &disk, 0)).unwrap();
        let began = Instant::now();
        let synced = || fs::read_to_string(running.share().join("synced")).ok()?.trim().parse::<u64>().ok();
        while synced().unwrap_or(0) < after {
            let said = || running.last_words();
            assert!(began.elapsed() < LIMIT, "{}", said());
            assert!(running.status().is_none(), "the script ended: {}", said());
            thread::sleep(Duration::from_millis(20));
        }
        thread::sleep(Duration::from_millis(more));
        let share = running.share();
        running.kill();
        let synced = fs::read_to_string(share.join("synced")).unwrap().trim().parse().unwrap();
        drop(running);
        let (status, said) = fixtures::vm::run(&machine, &work(LOOKS, &disk, synced), LIMIT).unwrap();
        assert_eq!(status, 0, "{synced} were synced: {}", String::from_utf8_lossy(&said));
    }
}
