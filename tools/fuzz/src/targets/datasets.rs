//! Manifests of texts, and the files of packages that texts are made of.

use crate::target::{Scratch, Target};
use ls_prep::datasets::{Format, Origin, manifests, text_of};
use std::path::{Component, Path};

/// All of the corpus are called so, as their file is.
const NAME: &str = "tiny.toml";

pub(crate) const MANIFEST: Target = Target {
    words: &[
        "name",
        "file",
        "title",
        "licence",
        "split",
        "bytes",
        "blake3",
        "[source]",
        "kind",
        "\"debian\"",
        "\"url\"",
        "\"local\"",
        "package",
        "version",
        "files",
        "format",
        "\"rdata\"",
        "\"html\"",
        "\"text\"",
        "\"evaluation\"",
        "\"../x\"",
        "\"/etc/passwd\"",
        "\"usr/../../x\"",
        "\"-o\"",
        "\"\"",
        "\"\\u0000\"",
        "'''",
        "[[",
        "{ a = 1 }",
        "18446744073709551616",
        "-1",
        "https://",
        "*",
    ],
    ..Target::new("manifest", "manifests of datasets", |folder| {
        let inner = folder.join("manifests");
        std::fs::create_dir_all(&inner).expect("a scratch folder");
        let file = Scratch::new(&inner, NAME);
        let folder = folder.to_owned();
        Box::new(move |bytes| {
            file.put(bytes, 0);
            let Ok(all) = manifests(&folder) else { return };
            let [manifest] = &all[..] else { panic!("{} manifests of one file", all.len()) };
            let text = manifest.path(&folder);
            assert_eq!(text.parent(), Some(&*folder.join("text")), "{}", text.display());
            match &manifest.source {
                Origin::Debian { package, files, .. } => {
                    assert!(!package.starts_with('-') && !package.contains('/'), "{package}");
                    let stays = |part: Component<'_>| matches!(part, Component::Normal(_));
                    assert!(Path::new(files).components().all(stays), "{files}");
                }
                Origin::Url { url, .. } => assert!(url.starts_with("http"), "{url}"),
                Origin::Local { .. } => {}
            }
        })
    })
};

/// The first byte says what the others are: an even one a page, an odd one data of R.
pub(crate) const PACKAGE: Target = Target {
    words: &[
        "<p>",
        "</p>",
        "<pre>",
        "</pre",
        "<script>",
        "</",
        "<",
        ">",
        "<!--",
        "-->",
        "&",
        "&amp;",
        "&#x",
        "&#xd800;",
        "&#99999999;",
        ";",
        "/>",
        "<é",
        "\u{a0}",
    ],
    seal,
    ..Target::new("package", "pages and data of packages", |folder| {
        let (page, data) = (Scratch::new(folder, "page.html"), Scratch::new(folder, "Rdata.rdb"));
        let folder = folder.to_owned();
        Box::new(move |bytes| {
            let [kind, bytes @ ..] = bytes else { return };
            let (file, name, format) = match kind % 2 {
                0 => (&page, "*.html", Format::Html),
                _ => (&data, "*.rdb", Format::Rdata),
            };
            file.put(bytes, 0);
            let _ = text_of(&folder, name, format);
        })
    })
};

/// Bytes before the content of an object: what the input is, the length, zlib's header, that of a stored block.
const BEFORE: usize = 1 + 4 + 2 + 5;

/// Lengths and checksum of data of R, if it is one object that is stored as it is.
fn seal(bytes: &mut [u8]) {
    if bytes.len() < BEFORE + 4 || bytes[0].is_multiple_of(2) {
        return;
    }
    let content = BEFORE..bytes.len() - 4;
    let Ok(length) = u16::try_from(content.len()) else { return };
    bytes[1..5].copy_from_slice(&u32::from(length).to_be_bytes());
    bytes[5..8].copy_from_slice(&[0x78, 0x01, 0x01]);
    bytes[8..10].copy_from_slice(&length.to_le_bytes());
    bytes[10..12].copy_from_slice(&(!length).to_le_bytes());
    let sum = adler(&bytes[content.clone()]);
    bytes[content.end..].copy_from_slice(&sum.to_be_bytes());
}

/// zlib's checksum.
fn adler(bytes: &[u8]) -> u32 {
    let (mut a, mut b) = (1u32, 0u32);
    for &byte in bytes {
        a = (a + u32::from(byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    (b << 16) | a
}
