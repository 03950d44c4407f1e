//! Finds and loads UCX at run time. UCX is neither linked nor shipped: its RDMA transports have to
//! come from the host, and a missing UCX has to be an ordinary error.

use std::ffi::{CStr, OsStr, c_uint};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use crate::exit_gate::{self, Inside};
use crate::sys::EntryPoints;

const SONAME: &str = "libucp.so.0";
const FLOOR: (u32, u32) = (1, 13);

/// Locations to search for UCX, besides the system's search path.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The user's choice (`KVPIPE_UCX_LIB`): a file, or a directory. Nothing else is tried then.
    pub explicit: Option<PathBuf>,
    /// The `libucx` wheel: the directory of `libucp.so.0`, or the package directory above `lib/`.
    pub wheel_dir: Option<PathBuf>,
}

/// Reason for which UCX cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// UCX was in use when this process was forked.
    #[error(
        "UCX cannot be used in the child of a fork() whose parent used it then; start processes with spawn or \
         forkserver, or fork before the first Pipe or Agent"
    )]
    Forked,
    /// No candidate could be loaded.
    #[error(
        "no UCX library could be loaded (tried {}); pip install 'kvpipe[ucx-cu12]', \
         or set KVPIPE_UCX_LIB to the directory of libucp.so.0",
        .tried.join("; ")
    )]
    NotFound {
        /// Each candidate, with the loader's error.
        tried: Vec<String>,
    },
    /// UCX is older than kvpipe can use.
    #[error(
        "UCX {}.{}.{} at {} is too old, 1.13 is needed; pip install 'kvpipe[ucx-cu12]', \
         or set KVPIPE_UCX_LIB to the directory of a newer libucp.so.0",
        .found.0, .found.1, .found.2, .path.display()
    )]
    TooOld {
        /// The library's version.
        found: (u32, u32, u32),
        /// The library.
        path: PathBuf,
    },
    /// The library lacks a function.
    #[error(
        "{} has no symbol {symbol}; pip install 'kvpipe[ucx-cu12]', \
         or set KVPIPE_UCX_LIB to the directory of a complete libucp.so.0",
        .path.display()
    )]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
        /// The library.
        path: PathBuf,
    },
}

/// UCP, loaded, with its functions resolved.
///
/// Never unloaded: UCM patches functions of libc that point into it.
pub struct Library {
    entry_points: EntryPoints,
    version: (u32, u32, u32),
    path: PathBuf,
}

impl Library {
    /// Loads UCX: the explicit choice; else a copy that this process has mapped already (a second
    /// one would be bound to the first one's libucs); else the system's and the wheel's, the
    /// system's first where there are RDMA devices, for which the wheel has no transports.
    ///
    /// # Errors
    /// [`LoadError`]; each message names the remedy.
    pub fn load(search: &Search) -> Result<Arc<Self>, LoadError> {
        if exit_gate::is_forked() {
            return Err(LoadError::Forked);
        }
        let mut tried = Vec::new();
        for candidate in candidates(search, has_rdma_devices()) {
            match candidate.open() {
                Ok(handle) => return Self::adopt(handle, &candidate).map(Arc::new),
                Err(reason) => tried.push(format!("{}: {reason}", candidate.describe())),
            }
        }
        Err(LoadError::NotFound { tried })
    }

    /// Checks the version and the symbols of a loaded library.
    fn adopt(handle: Handle, candidate: &Candidate) -> Result<Self, LoadError> {
        // UCM patches libc on the first use of UCX in the process: never dlclose.
        let handle = ManuallyDrop::new(libloading::Library::from(handle));
        let missing = |symbol| LoadError::MissingSymbol {
            symbol,
            path: candidate.path().into(),
        };
        // SAFETY: the handle is that of a library with UCP's name, and never dropped, so it stays loaded.
        let api = unsafe { EntryPoints::resolve(&handle) }.map_err(missing)?;
        let path = origin(&api).unwrap_or_else(|| candidate.path().into());
        let version = version_of(&api);
        if version.0 != FLOOR.0 || version.1 < FLOOR.1 {
            return Err(LoadError::TooOld {
                found: version,
                path,
            });
        }
        exit_gate::install();
        tracing::debug!(path = %path.display(), ?version, "ucx.loaded");
        Ok(Self {
            entry_points: api,
            version,
            path,
        })
    }

    /// UCX's functions. The calling thread is in UCX while it holds the result.
    pub(crate) fn api(&self) -> Api<'_> {
        Api {
            entry_points: &self.entry_points,
            _inside: Inside::enter(),
        }
    }

    /// The version, as `(major, minor, release)`.
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// The file that was loaded, as the dynamic linker reports it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// See [`Library::api`].
pub(crate) struct Api<'l> {
    entry_points: &'l EntryPoints,
    _inside: Inside,
}

impl Deref for Api<'_> {
    type Target = EntryPoints;

    fn deref(&self) -> &EntryPoints {
        self.entry_points
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library")
            .field("version", &self.version)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// True if the kernel knows RDMA devices (`/sys/class/infiniband` is not empty).
pub fn has_rdma_devices() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut entries| entries.next().is_some())
}

#[derive(Debug, PartialEq, Eq)]
enum Candidate {
    /// A copy that is mapped already.
    Mapped,
    /// The library that the dynamic linker finds by name.
    System,
    File(PathBuf),
}

impl Candidate {
    fn open(&self) -> Result<Handle, libloading::Error> {
        let name: &OsStr = self.path().as_os_str();
        let mode = match self {
            Self::Mapped => libc::RTLD_NOLOAD,
            Self::System | Self::File(_) => 0,
        };
        // SAFETY: loading runs UCX's constructors, which only read the environment and install
        // signal handlers as it says; UCX is trusted code named by the user or the system.
        unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL | mode) }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Mapped | Self::System => Path::new(SONAME),
            Self::File(path) => path,
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Mapped => "a copy already in this process".to_owned(),
            Self::System => format!("the system's {SONAME}"),
            Self::File(path) => path.display().to_string(),
        }
    }
}

fn candidates(search: &Search, rdma: bool) -> Vec<Candidate> {
    if let Some(path) = &search.explicit {
        return vec![Candidate::File(in_directory(path))];
    }
    let wheel = search
        .wheel_dir
        .as_deref()
        .map(|dir| Candidate::File(in_directory(dir)));
    let mut order = vec![Candidate::Mapped];
    if rdma {
        order.push(Candidate::System);
        order.extend(wheel);
    } else {
        order.extend(wheel);
        order.push(Candidate::System);
    }
    order
}

/// The library in a directory or its `lib`; a path that is no directory stands for itself.
fn in_directory(path: &Path) -> PathBuf {
    if !path.is_dir() {
        return path.to_owned();
    }
    let below = path.join("lib").join(SONAME);
    if below.exists() {
        below
    } else {
        path.join(SONAME)
    }
}

fn version_of(api: &EntryPoints) -> (u32, u32, u32) {
    let (mut major, mut minor, mut release): (c_uint, c_uint, c_uint) = (0, 0, 0);
    // SAFETY: three valid, distinct places for an unsigned int, as the function asks.
    unsafe { (api.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut release) };
    (major, minor, release)
}

/// The file a resolved function lies in.
fn origin(api: &EntryPoints) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;

    // SAFETY: Dl_info is four plain pointers and integers, for which zero is a valid value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let function = api.ucp_get_version as *const libc::c_void;
    // SAFETY: any address may be asked about, and `info` is a valid place for the answer.
    let found = unsafe { libc::dladdr(function, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr set the name to a C string that lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explicit_choice_is_the_only_candidate() {
        let search = Search {
            explicit: Some("/nowhere/libucp.so.0".into()),
            wheel_dir: Some("/wheel".into()),
        };
        let only = Candidate::File("/nowhere/libucp.so.0".into());
        assert_eq!(candidates(&search, true), [only]);
    }

    #[test]
    fn system_goes_before_wheel_where_there_are_rdma_devices() {
        let search = Search {
            explicit: None,
            wheel_dir: Some("/wheel".into()),
        };
        let wheel = || Candidate::File("/wheel".into());
        assert_eq!(
            candidates(&search, true),
            [Candidate::Mapped, Candidate::System, wheel()]
        );
        assert_eq!(
            candidates(&search, false),
            [Candidate::Mapped, wheel(), Candidate::System]
        );
    }

    #[test]
    fn library_without_the_symbols_is_an_error_that_names_one() {
        let candidate = Candidate::File("libc.so.6".into());
        let handle = candidate.open().expect("libc can be opened");
        let error = Library::adopt(handle, &candidate).expect_err("libc is not UCX");
        assert!(
            error.to_string().contains("has no symbol ucp_get_version"),
            "{error}"
        );
    }
}
