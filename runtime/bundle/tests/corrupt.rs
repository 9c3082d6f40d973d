//! Damage by accident: every flipped byte and every truncation of a bundle is found.

mod sample;

use ls_bundle::{Bundle, BundleError, ErrorClass};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

fn open_and_verify(path: &Path) -> Result<(), BundleError> {
    Bundle::open(path)?.verify(&mut |_, _| ())
}

#[test]
fn every_flipped_byte_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::learned_parts(), 1).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    for (at, &byte) in bytes.iter().enumerate() {
        let flipped = byte ^ (1 << (at % 8));
        file.write_all_at(&[flipped], at as u64).unwrap();
        let error = open_and_verify(&path)
            .expect_err(&format!("byte {at} flipped from {byte:#x} to {flipped:#x}"));
        // Only the name of the format makes another file of it; all other damage is called damage.
        let wanted = if (1..4).contains(&at) { ErrorClass::Foreign } else { ErrorClass::Corrupt };
        assert_eq!(error.class(), wanted, "byte {at}: {error}");
        file.write_all_at(&[byte], at as u64).unwrap();
    }
    open_and_verify(&path).unwrap();
}

#[test]
fn every_truncation_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::learned_parts(), 1).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    for len in (0..len).rev() {
        file.set_len(len).unwrap();
        let error = Bundle::open(&path).expect_err("a part is no bundle");
        assert_eq!(error.class(), ErrorClass::Incomplete, "{len} bytes: {error}");
    }
}

#[test]
fn damage_is_named_by_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::learned_parts(), 1).unwrap();
    let bundle = Bundle::open(&path).unwrap();
    let block = bundle.blocks().nth(14).unwrap();
    let tokenizer = bundle.sections()[4].extent;
    let model = bundle.sections()[1].extent;
    let data = bundle.data_extent();
    for (at, wanted) in [
        (9, "corrupt bundle: header: its checksum does not match".into()),
        (64 + 3, "corrupt bundle: section table: its checksum does not match".into()),
        (
            tokenizer.offset,
            format!("section tokenizer (17 bytes at {}): its checksum", tokenizer.offset),
        ),
        (model.end(), format!("padding at {}: it is not zero", model.end())),
        (
            block.extent.offset + 1,
            format!(
                "layer 1 ffn block 2 ({} bytes at {}): its checksum does not match",
                block.extent.len, block.extent.offset
            ),
        ),
        (data.end() - 1, format!("padding at {}: it is not zero", data.end() - 1)),
    ] {
        let mut bytes = fs::read(&path).unwrap();
        bytes[at as usize] ^= 0x10;
        let damaged = folder.path().join("damaged.lsb");
        fs::write(&damaged, bytes).unwrap();
        let error = open_and_verify(&damaged).unwrap_err().to_string();
        assert!(error.contains(&wanted), "{error}\n{wanted}");
        assert!(error.contains("damaged.lsb: "), "{error}");
    }
}

#[test]
fn other_files_are_foreign() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other");
    for bytes in [&b"GGUF\x03\0\0\0"[..], b"{}", &[0; 5000], b"\x8D no bundle"] {
        fs::write(&path, bytes).unwrap();
        let error = Bundle::open(&path).unwrap_err();
        assert_eq!(error.class(), ErrorClass::Foreign, "{error}");
    }
    assert_eq!(Bundle::open(folder.path()).unwrap_err().class(), ErrorClass::Foreign);
    assert_eq!(Bundle::open(Path::new("/dev/null")).unwrap_err().class(), ErrorClass::Foreign);
    assert_eq!(Bundle::open(&folder.path().join("none")).unwrap_err().class(), ErrorClass::Io);
}

#[test]
fn a_transfer_in_text_mode_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::learned_parts(), 1).unwrap();
    let text = fs::read(&path).unwrap();
    let line_ends = [text[..4].to_vec(), text[5..].to_vec()].concat();
    let seven_bits: Vec<u8> = text.iter().map(|byte| byte & 0x7F).collect();
    for bytes in [line_ends, seven_bits] {
        fs::write(&path, bytes).unwrap();
        let error = Bundle::open(&path).unwrap_err();
        assert!(error.to_string().contains("text mode"), "{error}");
        assert_eq!(error.class(), ErrorClass::Corrupt);
    }
}

#[test]
fn bytes_behind_the_end_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::learned_parts(), 1).unwrap();
    let len = fs::metadata(&path).unwrap().len();
    File::options().write(true).open(&path).unwrap().set_len(len + 4096).unwrap();
    let error = Bundle::open(&path).unwrap_err();
    assert!(error.to_string().contains("4096 bytes behind the end"), "{error}");
}
