//! Writes the bundle that every later version must be able to open: `cargo run -p ls-bundle --example golden`.
//! A change of its bytes is a change of the format, to be reviewed as one.

#[path = "../tests/sample/mod.rs"]
mod sample;

use std::path::Path;

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/golden");
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    for (name, parts) in
        [("tiny-v1.lsb", sample::tiny_parts()), ("tiny-v2.lsb", sample::learned_parts())]
    {
        sample::write(&folder.join(name), parts, 1).expect("the sample is a valid bundle");
    }
}
