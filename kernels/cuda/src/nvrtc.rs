//! NVRTC, the compiler of kernels, found at run time: the toolkit's library or that of a Python wheel.

use crate::error::Kind;
use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// File names, by the major version of the toolkit, the newest first.
const NAMES: [(u32, &str); 3] =
    [(13, "libnvrtc.so.13"), (12, "libnvrtc.so.12"), (11, "libnvrtc.so.11.2")];
/// Where Python keeps packages; `*` is any version.
const PACKAGES: [&str; 4] = [
    "/usr/local/lib/python3.*/site-packages",
    "/usr/local/lib/python3.*/dist-packages",
    "/usr/lib/python3/dist-packages",
    "~/.local/lib/python3.*/site-packages",
];
/// Where a wheel's library lies in a folder of packages.
const WHEELS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];
/// Where toolkits are installed.
const TOOLKITS: [&str; 4] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda-*/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
];

type Program = *mut c_void;

/// The loaded library.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
    version: (c_int, c_int),
}

impl Nvrtc {
    /// The newest NVRTC of at most major version `newest_major` (what it makes must be accepted by the driver): in
    /// `folders`, then where the system's loader looks, then in the usual places of toolkits and of Python packages.
    pub fn find(newest_major: u32, folders: &[PathBuf]) -> Option<Nvrtc> {
        for (major, name) in NAMES {
            if major > newest_major {
                continue;
            }
            let mut candidates: Vec<PathBuf> =
                folders.iter().flat_map(|f| wheels(f).chain([f.clone()])).collect();
            candidates.push(PathBuf::new());
            candidates.extend(TOOLKITS.iter().flat_map(|pattern| expand(pattern)));
            let packages = PACKAGES.iter().flat_map(|pattern| expand(pattern));
            candidates.extend(packages.flat_map(|folder| wheels(&folder).collect::<Vec<_>>()));
            for folder in candidates {
                let path = folder.join(name);
                let may_be = folder.as_os_str().is_empty() || path.exists();
                if let Some(nvrtc) = may_be.then(|| Nvrtc::load(&path)).flatten() {
                    return Some(nvrtc);
                }
            }
        }
        None
    }

    fn load(path: &Path) -> Option<Nvrtc> {
        // Its helper library lies beside it, and is not always found from there.
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with("libnvrtc-builtins.so") {
                    // SAFETY: NVIDIA's library of tables, whose initialisers do nothing else.
                    std::mem::forget(unsafe { Library::new(entry.path()) });
                }
            }
        }
        // SAFETY: NVIDIA's compiler, whose initialisers do nothing but set itself up.
        let library = unsafe { Library::new(path) }.ok()?;
        let mut nvrtc = Nvrtc { library, version: (0, 0) };
        let (mut major, mut minor) = (0, 0);
        nvrtc
            .call::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(
                "nvrtcVersion",
                // SAFETY: two integers to be written.
                |f| unsafe { f(&mut major, &mut minor) },
            )
            .ok()?;
        nvrtc.version = (major, minor);
        Some(nvrtc)
    }

    /// Major and minor version.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles `text` (with `headers`: name and text) for sm_`arch` to machine code.
    pub(crate) fn compile(
        &self,
        name: &'static str,
        text: &str,
        headers: &[(&str, &str)],
        arch: u32,
    ) -> Result<Vec<u8>, Kind> {
        let c = |text: &str| CString::new(text).expect("kernels have no zero bytes");
        let (text, file) = (c(text), c(name));
        let bodies: Vec<CString> = headers.iter().map(|(_, body)| c(body)).collect();
        let names: Vec<CString> = headers.iter().map(|(name, _)| c(name)).collect();
        let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (bodies, names_of) = (pointers(&bodies), pointers(&names));
        let mut program: Program = std::ptr::null_mut();
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        self.call::<Create>("nvrtcCreateProgram", |f| {
            let count = headers.len() as c_int;
            // SAFETY: strings ended by zero that outlive the call, `count` of each; NVRTC copies them.
            unsafe {
                f(
                    &mut program,
                    text.as_ptr(),
                    file.as_ptr(),
                    count,
                    bodies.as_ptr(),
                    names_of.as_ptr(),
                )
            }
        })?;
        let compiled = self.compile_program(name, program, arch);
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        // SAFETY: made above, destroyed once.
        self.call::<Destroy>("nvrtcDestroyProgram", |f| unsafe { f(&mut program) })?;
        compiled
    }

    fn compile_program(
        &self,
        name: &'static str,
        program: Program,
        arch: u32,
    ) -> Result<Vec<u8>, Kind> {
        let options = [
            format!("--gpu-architecture=sm_{arch}"),
            "--std=c++17".into(),
            "-default-device".into(),
        ];
        let options = options.map(|option| CString::new(option).expect("options have no zeros"));
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        let compiled = self.call::<Compile>("nvrtcCompileProgram", |f| {
            // SAFETY: a program of NVRTC's, and as many strings as it is told.
            unsafe { f(program, pointers.len() as c_int, pointers.as_ptr()) }
        });
        if compiled.is_err() {
            let log = self.text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            return Err(Kind::Compile { name, log });
        }
        self.text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    }

    /// What one call says the size of, and another writes.
    fn text(
        &self,
        program: Program,
        size: &'static str,
        get: &'static str,
    ) -> Result<Vec<u8>, Kind> {
        let mut len = 0usize;
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        // SAFETY: a program of NVRTC's and a size to be written.
        self.call::<Size>(size, |f| unsafe { f(program, &mut len) })?;
        let mut bytes = vec![0u8; len];
        type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        // SAFETY: NVRTC writes exactly the size that it named.
        self.call::<Get>(get, |f| unsafe { f(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn call<F: Copy>(&self, name: &'static str, call: impl FnOnce(F) -> c_int) -> Result<(), Kind> {
        // SAFETY: F is the type that NVRTC's header gives the function of this name.
        let function = unsafe { self.library.get::<F>(name.as_bytes()) };
        let function = function.map_err(|error| Kind::Nvrtc(error.to_string()))?;
        match call(*function) {
            0 => Ok(()),
            code => Err(Kind::Nvrtc(format!("{name} failed with code {code}"))),
        }
    }
}

fn wheels(packages: &Path) -> impl Iterator<Item = PathBuf> {
    WHEELS.iter().map(|wheel| packages.join(wheel))
}

/// The folders that a pattern names; `*` in one component stands for anything, `~` for the user's home.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from("/")];
    for component in pattern.split('/').filter(|component| !component.is_empty()) {
        found = match component.split_once('*') {
            _ if component == "~" => std::env::home_dir().into_iter().collect(),
            None => found.into_iter().map(|folder| folder.join(component)).collect(),
            Some((start, end)) => {
                let fits = |name: &str| name.starts_with(start) && name.ends_with(end);
                let mut folders: Vec<PathBuf> = found
                    .iter()
                    .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
                    .filter(|entry| fits(&entry.file_name().to_string_lossy()))
                    .map(|entry| entry.path())
                    .collect();
                folders.sort_by(|a, b| b.cmp(a));
                folders
            }
        };
    }
    found.retain(|folder| folder.is_dir());
    found
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn patterns_name_the_folders_that_exist() {
        let folder = std::env::temp_dir().join(format!("ls-cuda-expand-{}", std::process::id()));
        for name in ["python3.9/x", "python3.11/x", "other/x"] {
            std::fs::create_dir_all(folder.join(name)).unwrap();
        }
        let found = expand(&format!("{}/python3.*/x", folder.display()));
        let names: Vec<_> = found.iter().map(|f| f.strip_prefix(&folder).unwrap()).collect();
        assert_eq!(names, ["python3.9/x", "python3.11/x"].map(std::path::Path::new));
        assert!(expand("/nonexistent-*/x").is_empty());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
