//! A disk that is full in the middle of writing: nothing stays behind.
//!
//! The disk is played by a limit on the size of files, under which this test runs itself once more.

mod sample;

use ls_bundle::ErrorClass;
use std::fs;
use std::path::Path;
use std::process::Command;

const LIMITED: &str = "LS_BUNDLE_TEST_LIMITED";

#[test]
fn a_full_disk_leaves_the_old_bundle_and_nothing_else() {
    if std::env::var_os(LIMITED).is_some() {
        return write_under_the_limit();
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tiny.lsb"), "old").unwrap();
    // Without the trap the limit would kill the process instead of failing its write.
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$0\""])
        .arg(std::env::current_exe().unwrap())
        .current_dir(folder.path())
        .env(LIMITED, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read(folder.path().join("tiny.lsb")).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

fn write_under_the_limit() {
    let error = sample::write(Path::new("tiny.lsb"), sample::learned_parts(), 1).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Io, "{error}");
}
