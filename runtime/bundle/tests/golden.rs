//! Bundles of every released version open, and the one of this version is made again byte for byte.

mod sample;

use ls_bundle::Bundle;
use ls_bundle::ids::{LayerId, NeuronId, TokenId};
use std::path::Path;

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/golden/tiny-v1.lsb")
}

/// Numbers written down, not computed: they hold whatever the code becomes.
#[test]
fn version_1_opens_with_its_contents() {
    let bundle = Bundle::open(&golden()).unwrap();
    bundle.verify(&mut |_, _| ()).unwrap();
    assert_eq!(bundle.identity().seed, 7);
    assert_eq!(bundle.model().name, "tiny");
    assert_eq!(bundle.model().special.stop, [2, 3]);
    assert_eq!(bundle.tokenizer(), r#"{"version":"1.0"}"#);
    assert_eq!(bundle.chat_template(), Some("{{ messages }}"));
    assert_eq!(bundle.vocabulary().piece(TokenId(9)), b" w9");
    assert_eq!(bundle.placement().unwrap().layer(LayerId(1))[0], NeuronId(1));
    assert_eq!(bundle.vectors().final_norm.len(), 10);
}

#[test]
fn this_version_writes_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::tiny_parts(), 1).unwrap();
    assert!(
        std::fs::read(path).unwrap() == std::fs::read(golden()).unwrap(),
        "the format has changed: see examples/golden.rs"
    );
}
