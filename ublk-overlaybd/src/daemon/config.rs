//! The daemon's file: one TOML, whose unknown keys are refused by name.

use super::devices::Defaults;
use crate::ublk::device::Shape;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a file is none.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{path}: cannot read")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is no TOML, or has a key that nobody knows, or one of another type.
    #[error("{path}: {source}")]
    Toml {
        /// Which file.
        path: PathBuf,
        /// Where and why; names the key.
        source: Box<toml::de::Error>,
    },
    /// A value cannot be.
    #[error("{path}: {why}")]
    Value {
        /// Which file.
        path: PathBuf,
        /// Which key, and what is wrong with it.
        why: String,
    },
}

/// What the daemon was told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where its table is.
    pub state: PathBuf,
    /// Where it listens.
    pub socket: PathBuf,
    /// Threads for what waits: so many for reads, and as many for everything else.
    pub threads: usize,
    /// For all devices.
    pub defaults: Defaults,
    /// Where what is fetched is kept, and how many bytes of it.
    pub cache: Option<(PathBuf, u64)>,
    /// The store that is asked for layers which are in no file: a path, `3fs:PATH` or `s3://BUCKET/PREFIX`.
    pub store: Option<fs3_client::StoreLocation>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Wire {
    state: PathBuf,
    socket: PathBuf,
    threads: usize,
    max_devices: usize,
    queues: u16,
    depth: u16,
    request_bytes: u32,
    request_deadline_ms: u64,
    control_deadline_ms: u64,
    cache: Option<PathBuf>,
    cache_bytes: u64,
    store: Option<String>,
    node: Option<WireNode>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireNode {
    user: u32,
    group: u32,
    mode: String,
}

impl Default for Wire {
    fn default() -> Self {
        let Shape { queues, depth, request } = Shape::default();
        Self {
            state: "/var/lib/ublk-overlaybd".into(),
            socket: "/run/ublk-overlaybd.sock".into(),
            threads: 64,
            max_devices: 4096,
            queues,
            depth,
            request_bytes: request,
            request_deadline_ms: 30_000,
            control_deadline_ms: 30_000,
            cache: None,
            cache_bytes: 16 << 30,
            store: None,
            node: None,
        }
    }
}

impl Config {
    /// What counts where there is no file.
    ///
    /// # Panics
    /// Never: a test reads it.
    #[must_use]
    pub fn built_in() -> Self {
        #[allow(clippy::expect_used)]
        Self::checked(Wire::default()).expect("the built-in values are allowed")
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// Names the key that is wrong.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let named = path.to_owned();
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Io { path: named.clone(), source })?;
        let wire = toml::from_str(&text)
            .map_err(|source| ConfigError::Toml { path: named.clone(), source: Box::new(source) })?;
        Self::checked(wire).map_err(|why| ConfigError::Value { path: named, why })
    }

    fn checked(wire: Wire) -> Result<Self, String> {
        let within = |key: &str, value: u64, most: u64| {
            if (1..=most).contains(&value) { Ok(()) } else { Err(format!("{key} is {value}: 1 to {most} will do")) }
        };
        for (key, path) in [("state", &wire.state), ("socket", &wire.socket)] {
            if !path.is_absolute() {
                return Err(format!("{key} is {}: it must be an absolute path", path.display()));
            }
        }
        if let Some(cache) = wire.cache.as_ref().filter(|cache| !cache.is_absolute()) {
            return Err(format!("cache is {}: it must be an absolute path", cache.display()));
        }
        if wire.store.is_some() && wire.cache.is_none() {
            return Err("store is given, and no cache: what is read from it is kept there".to_owned());
        }
        let store = wire.store.map(|store| store.parse().map_err(|error| format!("store is `{store}`: {error}")));
        within("threads", wire.threads as u64, 4096)?;
        within("max_devices", wire.max_devices as u64, 1 << 20)?;
        within("request_deadline_ms", wire.request_deadline_ms, 3_600_000)?;
        within("control_deadline_ms", wire.control_deadline_ms, 3_600_000)?;
        let shape = Shape { queues: wire.queues, depth: wire.depth, request: wire.request_bytes };
        shape.check().map_err(|why| why.replace("shape.request", "request_bytes").replace("shape.", ""))?;
        let node = wire.node.map(|node| {
            let mode = u32::from_str_radix(&node.mode, 8).ok().filter(|mode| *mode <= 0o777);
            let mode = mode.ok_or_else(|| format!("node.mode is `{}`: octal permissions such as `0660`", node.mode))?;
            Ok::<_, String>((node.user, node.group, mode))
        });
        let defaults = Defaults {
            shape,
            most: wire.max_devices,
            node: node.transpose()?,
            request: Duration::from_millis(wire.request_deadline_ms),
            operation: Duration::from_millis(wire.control_deadline_ms),
        };
        Ok(Self {
            state: wire.state,
            socket: wire.socket,
            threads: wire.threads,
            defaults,
            cache: wire.cache.map(|cache| (cache, wire.cache_bytes)),
            store: store.transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Config::read(file.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn every_key() {
        let config = read(
            "state = '/s'\nsocket = '/x.sock'\nthreads = 8\nmax_devices = 9\nqueues = 2\ndepth = 16\n\
             request_bytes = 131072\nrequest_deadline_ms = 5\ncontrol_deadline_ms = 6\n\
             cache = '/c'\ncache_bytes = 7\nstore = '/blobs'\n\
             [node]\nuser = 1\ngroup = 2\nmode = '0640'\n",
        )
        .unwrap();
        assert_eq!((config.state, config.socket, config.threads), ("/s".into(), "/x.sock".into(), 8));
        assert_eq!((config.cache, config.store), (Some(("/c".into(), 7)), Some("/blobs".parse().unwrap())));
        let Defaults { shape, most, node, request, operation } = config.defaults;
        assert_eq!(shape, Shape { queues: 2, depth: 16, request: 131_072 });
        assert_eq!((most, node), (9, Some((1, 2, 0o640))));
        assert_eq!((request, operation), (Duration::from_millis(5), Duration::from_millis(6)));
        assert_eq!(Config::built_in().defaults.shape, read("").unwrap().defaults.shape);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, key) in [
            ("stat = '/s'", "stat"),
            ("state = 's'", "state"),
            ("depth = 0", "depth is 0"),
            ("queues = -1", "queues"),
            ("request_bytes = 1000", "request_bytes is 1000"),
            ("threads = 0", "threads"),
            ("store = '/s'", "store"),
            ("cache = 'c'", "cache"),
            ("request_deadline_ms = 0", "request_deadline_ms"),
            ("[node]\nuser = 0\ngroup = 0\nmode = '999'", "node.mode"),
            ("[node]\nuser = 0", "group"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(key), "{text}: {error}");
        }
    }
}
