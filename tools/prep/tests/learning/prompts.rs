//! Calibration text becomes windows of tokens.

use crate::{Bench, text, tiny};
use ls_prep::exit::Exit;
use ls_prep::recipe::Recipe;
use ls_prep::stage::Stage;
use ls_prep::stages::prompts::{Prompts, Windows};
use std::path::PathBuf;

fn windows(bench: &Bench, texts: &[PathBuf], recipe: &Recipe) -> Windows {
    let source = bench.source();
    let prompts = Prompts::new(&source, texts, recipe).unwrap();
    let (artifact, _) = source.store.run(&prompts, None, &mut ()).unwrap();
    Windows::read(&artifact, source.model.config.vocab_size).unwrap()
}

/// The bytes that tokens of the synthetic model stand for.
fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().map(|&token| u8::try_from(token).unwrap()).collect()
}

#[test]
fn windows_are_pieces_of_the_text_that_do_not_overlap() {
    let bench = Bench::new();
    let whole = std::fs::read(text()).unwrap();
    let found = windows(&bench, &[text()], &tiny());
    assert_eq!((found.tokens.len(), found.window), (512, 32));
    let mut from = 0;
    for window in found.tokens.chunks(32) {
        let piece = bytes(window);
        let at = whole[from..].windows(32).position(|text| text == piece);
        from += at.expect("a window is a piece of the text behind the one before") + 32;
    }
    assert!(from > whole.len() / 2, "windows lie all over the text: the last ends at {from}");
}

#[test]
fn texts_share_the_budget_by_size() {
    let bench = Bench::new();
    let small = bench.dir.path().join("small.txt");
    std::fs::write(&small, vec![b'x'; std::fs::read(text()).unwrap().len() / 3]).unwrap();
    let found = windows(&bench, &[text(), small], &tiny());
    assert_eq!(found.of_text, [12, 4]);
    assert_eq!(bytes(&found.tokens[12 * 32..]), [b'x'; 4 * 32]);
}

#[test]
fn a_text_shorter_than_the_budget_gives_what_it_has() {
    let bench = Bench::new();
    let short = bench.dir.path().join("short.txt");
    std::fs::write(&short, "It was a bright cold day, and the clocks were striking thirteen.\n")
        .unwrap();
    assert_eq!(windows(&bench, std::slice::from_ref(&short), &tiny()).of_text, [2]);
    std::fs::write(&short, "Too short.").unwrap();
    let source = bench.source();
    let prompts = Prompts::new(&source, &[short], &tiny()).unwrap();
    let error = source.store.run(&prompts, None, &mut ()).unwrap_err();
    assert_eq!(error.exit(), Exit::Usage);
    assert!(error.to_string().contains("shorter than a window"), "{error}");
}

#[test]
fn the_key_follows_text_model_and_recipe() {
    let bench = Bench::new();
    let source = bench.source();
    let other = bench.dir.path().join("other.txt");
    std::fs::write(&other, "something else\n").unwrap();
    let key =
        |texts: &[PathBuf], recipe: &Recipe| Prompts::new(&source, texts, recipe).unwrap().key();
    let base = key(&[text()], &tiny());
    let copy = bench.dir.path().join("copy.txt");
    std::fs::copy(text(), &copy).unwrap();
    assert_eq!(key(&[copy], &tiny()), base, "names do not matter");
    assert_ne!(key(std::slice::from_ref(&other), &tiny()), base);
    assert_ne!(key(&[text(), other], &tiny()), base);
    let mut recipe = tiny();
    recipe.seed = 1;
    assert_ne!(key(&[text()], &recipe), base);
    recipe = tiny();
    recipe.mlp.epochs += 1;
    assert_eq!(key(&[text()], &recipe), base, "what other stages do does not matter");
    assert_eq!(Prompts::new(&source, &[], &tiny()).unwrap_err().exit(), Exit::Usage);
}
