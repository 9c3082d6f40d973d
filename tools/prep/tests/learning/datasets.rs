//! Manifests and the texts they describe.

use ls_prep::datasets::{Manifest, fetch, import, manifests};
use ls_prep::exit::Exit;
use ls_prep::key::Key;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

fn local(text: &[u8]) -> Manifest {
    let hash = Key::of(text);
    toml::from_str(&format!(
        "name = \"mine\"\ntitle = \"t\"\nlicence = \"l\"\nsplit = \"evaluation\"\nblake3 = \"{hash}\"\n\
         [source]\nkind = \"local\"\nnote = \"ask me\"\n"
    ))
    .unwrap()
}

#[test]
fn the_repositorys_manifests_are_sound() {
    let found = manifests(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../datasets")).unwrap();
    let names: Vec<&str> = found.iter().map(|manifest| manifest.name.as_str()).collect();
    assert!(
        ["debian-handbook", "wikitext2-test", "truthfulqa", "coqa", "qasper"]
            .iter()
            .all(|n| names.contains(n)),
        "{names:?}"
    );
}

#[test]
fn a_local_text_is_absent_right_or_wrong() {
    let dir = TempDir::new().unwrap();
    let manifest = local(b"some text");
    assert_eq!(fetch(dir.path(), &manifest, None).unwrap().outcome, "absent");
    std::fs::create_dir(dir.path().join("text")).unwrap();
    std::fs::write(dir.path().join("text/mine.txt"), "some text").unwrap();
    assert_eq!(fetch(dir.path(), &manifest, None).unwrap().outcome, "kept");
    std::fs::write(dir.path().join("text/mine.txt"), "other text").unwrap();
    assert_eq!(fetch(dir.path(), &manifest, None).unwrap_err().exit(), Exit::Corrupt);
}

#[test]
fn a_file_that_people_have_is_imported_if_it_is_the_one() {
    let dir = TempDir::new().unwrap();
    let (file, manifest) = (dir.path().join("mine.download"), local(b"some text"));
    std::fs::write(&file, "other text").unwrap();
    let error = import(dir.path(), &manifest, &file).unwrap_err();
    let said = error.to_string();
    assert!(error.exit() == Exit::Corrupt && said.contains("is not mine"), "{said}");
    assert!(!dir.path().join("text/mine.txt").exists());
    std::fs::write(&file, "some text").unwrap();
    let imported = import(dir.path(), &manifest, &file).unwrap();
    assert_eq!((imported.outcome, imported.note.as_str()), ("imported", ""));
    assert_eq!(fetch(dir.path(), &manifest, None).unwrap().outcome, "kept");
    let unchecked = Manifest { blake3: None, file: Some("mine.csv".into()), ..manifest };
    let imported = import(dir.path(), &unchecked, &file).unwrap();
    assert!(imported.note.contains("no hash"), "{}", imported.note);
    assert_eq!(std::fs::read_to_string(dir.path().join("text/mine.csv")).unwrap(), "some text");
    std::fs::write(&file, "").unwrap();
    assert_eq!(import(dir.path(), &unchecked, &file).unwrap_err().exit(), Exit::Incomplete);
}

#[test]
fn a_text_with_an_address_is_downloaded_or_said_to_be_absent() {
    if Command::new("curl").arg("--version").output().is_err() {
        eprintln!("curl is not here: nothing is tested");
        return;
    }
    let dir = TempDir::new().unwrap();
    let served = dir.path().join("served.csv");
    std::fs::write(&served, "some text").unwrap();
    let manifest = |text: &[u8], url: &str| -> Manifest {
        let source = format!("kind = \"url\"\nurl = \"{url}\"\nnote = \"a table\"\n");
        let text = toml::to_string(&local(text)).unwrap();
        let head = text.split("[source]").next().unwrap().to_owned();
        toml::from_str(&format!("file = \"mine.csv\"\n{head}\n[source]\n{source}")).unwrap()
    };
    let url = format!("file://{}", served.display());
    let absent = fetch(dir.path(), &manifest(b"some text", &format!("{url}.not")), None).unwrap();
    assert_eq!(absent.outcome, "absent");
    for words in ["curl", "a table", "ls-prep datasets import mine FILE"] {
        assert!(absent.note.contains(words), "no {words:?} in: {}", absent.note);
    }
    let error = fetch(dir.path(), &manifest(b"other text", &url), None).unwrap_err();
    assert_eq!(error.exit(), Exit::Corrupt, "{error}");
    assert_eq!(std::fs::read_dir(dir.path().join("text")).unwrap().count(), 0, "nothing is left");
    assert_eq!(
        fetch(dir.path(), &manifest(b"some text", &url), None).unwrap().outcome,
        "downloaded"
    );
    assert_eq!(std::fs::read_to_string(dir.path().join("text/mine.csv")).unwrap(), "some text");
    assert_eq!(fetch(dir.path(), &manifest(b"some text", &url), None).unwrap().outcome, "kept");
}

#[test]
fn broken_manifests_are_named() {
    let local = "kind = \"local\"\nnote = \"n\"";
    let url = "kind = \"url\"\nnote = \"n\"\nurl = \"--config=/tmp/x\"";
    let debian = |package: &str, files: &str| {
        format!(
            "kind = \"debian\"\npackage = \"{package}\"\nversion = \"1\"\nfiles = \"{files}\"\nformat = \"text\""
        )
    };
    let sources = [
        (url.to_owned(), "https://"),
        (debian("-oDir=/tmp", "usr/a.txt"), "-oDir"),
        (debian("a/b", "usr/a.txt"), "a/b"),
        (debian("mine", "/etc/passwd"), "/etc/passwd"),
        (debian("mine", "usr/../../x"), "usr/../../x"),
    ];
    let cases = [
        ("name = \"other\"", "is called"),
        ("split = \"training\"", "training"),
        ("colour = \"blue\"", "colour"),
        ("blake3 = \"12\"", "blake3"),
        ("file = \"../mine.csv\"", "../mine.csv"),
    ];
    let lines = cases.into_iter().map(|(line, word)| (line, local.to_owned(), word));
    let sources = sources.map(|(source, word)| ("name = \"mine\"", source, word));
    for (line, source, word) in lines.chain(sources) {
        let dir = TempDir::new().unwrap();
        std::fs::create_dir(dir.path().join("manifests")).unwrap();
        let key = line.split(' ').next().unwrap();
        let sound = "name = \"mine\"\ntitle = \"t\"\nlicence = \"l\"\nsplit = \"evaluation\"\n";
        let kept: Vec<&str> = sound.lines().filter(|kept| !kept.starts_with(key)).collect();
        let text = format!("{line}\n{}\n[source]\n{source}\n", kept.join("\n"));
        std::fs::write(dir.path().join("manifests/mine.toml"), text).unwrap();
        let error = manifests(dir.path()).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("mine.toml"), "no {word:?} in: {error}");
    }
}

/// Builds a package with `dpkg-deb`; nothing where that is missing.
fn package(folder: &Path) -> Option<()> {
    let root = folder.join("root");
    std::fs::create_dir_all(root.join("DEBIAN")).unwrap();
    std::fs::create_dir_all(root.join("usr/share/doc/toy")).unwrap();
    let control = "Package: toy\nVersion: 1.0\nArchitecture: all\nMaintainer: n <n@example>\nDescription: d\n";
    std::fs::write(root.join("DEBIAN/control"), control).unwrap();
    let page = |text: &str| format!("<html><body><p>{}</p></body></html>", text.repeat(20));
    std::fs::write(root.join("usr/share/doc/toy/b.html"), page("Two &amp; ")).unwrap();
    std::fs::write(root.join("usr/share/doc/toy/a.html"), page("One and a ")).unwrap();
    std::fs::write(root.join("usr/share/doc/toy/c.css"), page("Three ")).unwrap();
    let mut build = Command::new("dpkg-deb");
    build.arg("--build").arg(&root).arg(folder.join("toy_1.0_all.deb"));
    build.output().ok().filter(|output| output.status.success()).map(|_| ())
}

#[test]
fn a_package_is_unpacked_and_checked() {
    let dir = TempDir::new().unwrap();
    let Some(()) = package(dir.path()) else { return };
    let wanted =
        format!("{}\n\n{}\n\n", "One and a ".repeat(20).trim(), "Two & ".repeat(20).trim());
    let manifest = |version: &str, text: &str| -> Manifest {
        toml::from_str(&format!(
            "name = \"toy\"\ntitle = \"t\"\nlicence = \"l\"\nsplit = \"calibration\"\nblake3 = \"{}\"\n[source]\n\
             kind = \"debian\"\npackage = \"toy\"\nversion = \"{version}\"\nfiles = \"usr/share/doc/toy/*.html\"\n\
             format = \"html\"\n",
            Key::of(text.as_bytes())
        ))
        .unwrap()
    };
    let datasets = dir.path().join("datasets");
    let fetch = |manifest: &Manifest| fetch(&datasets, manifest, Some(dir.path()));
    let path = datasets.join("text/toy.txt");
    let error = fetch(&manifest("1.0", "other")).unwrap_err();
    assert_eq!((error.exit(), path.exists()), (Exit::Corrupt, false), "{error}");
    assert_eq!(fetch(&manifest("0.9", "other")).unwrap().outcome, "other version");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(fetch(&manifest("1.0", &wanted)).unwrap().outcome, "unpacked");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), wanted);
    assert_eq!(fetch(&manifest("1.0", &wanted)).unwrap().outcome, "kept");
    assert_eq!(
        std::fs::read_dir(datasets.join("text")).unwrap().count(),
        1,
        "nothing else is left"
    );
}
