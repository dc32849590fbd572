//! What all repositories share: the HTTP client, and what this machine says of registries.

use super::mirrors::{Candidate, MirrorRule, Registries};
use super::reference::{ImageRef, Place, Which};
use super::session::Session;
use super::{RegistryError, Repository, credentials};
use crate::blob_store::retry::Policy;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Most redirects on the way to a blob.
const REDIRECTS: usize = 5;

/// How to talk to registries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The only file to take credentials from; else podman's and docker's own.
    pub auth_file: Option<PathBuf>,
    /// Mirrors, before those of `registries.conf`.
    pub mirrors: Vec<MirrorRule>,
    /// HTTP without TLS for all hosts. Hosts on this machine that speak no TLS need not be named so.
    pub plain_http: bool,
    /// Certificates in PEM to trust beside the system's.
    pub ca_files: Vec<PathBuf>,
    /// Longest silence of a server.
    pub timeout: Duration,
    /// How often to try again.
    pub retry: Policy,
    /// Ranges of one large blob that are fetched at a time, at least 1. More than one costs time where one connection
    /// can fill the line, and saves it where a server limits each connection.
    pub ranges: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            auth_file: None,
            mirrors: Vec::new(),
            plain_http: false,
            ca_files: Vec::new(),
            timeout: Duration::from_secs(60),
            retry: Policy::default(),
            ranges: 1,
        }
    }
}

/// Talks to registries as [`Options`] and the machine's files say. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    http: reqwest::Client,
    options: Options,
    registries: Registries,
}

impl Client {
    /// Reads certificates and `registries.conf`; asks nobody yet.
    ///
    /// # Errors
    /// A file that is not usable.
    pub fn new(options: Options) -> Result<Self, RegistryError> {
        let http = build_http(&options)?;
        Ok(Self { inner: Arc::new(Inner { http, registries: read_registries()?, options }) })
    }

    /// How it talks.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    /// Where to read `image` from: its mirrors, then its own repository. Finds the credentials for each, which may run
    /// a credential helper and so takes a while.
    ///
    /// # Errors
    /// When it is blocked, or a file with credentials or a helper fails.
    pub fn sources(&self, image: &ImageRef) -> Result<Vec<Repository>, RegistryError> {
        self.repositories(image.place(), true, matches!(image.which(), Which::Digest(_)))
    }

    /// Where to write to.
    ///
    /// # Errors
    /// As [`Client::sources`].
    pub fn target(&self, place: &Place) -> Result<Repository, RegistryError> {
        let mut found = self.repositories(place, false, false)?;
        Ok(found.remove(0))
    }

    fn repositories(&self, place: &Place, to_read: bool, by_digest: bool) -> Result<Vec<Repository>, RegistryError> {
        let Inner { http, options, registries } = &*self.inner;
        let candidates = registries.candidates(&options.mirrors, place, to_read, by_digest);
        let candidates = candidates.map_err(|prefix| RegistryError::Blocked { place: place.to_string(), prefix })?;
        let mut found = Vec::new();
        for Candidate { place, insecure } in candidates {
            let credentials = credentials::find(options.auth_file.as_deref(), &place)?;
            let session = Session::new(http.clone(), place, credentials, insecure, options);
            found.push(Repository::new(session));
        }
        Ok(found)
    }
}

fn build_http(options: &Options) -> Result<reqwest::Client, RegistryError> {
    // The process's provider of cryptography; harmless when there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut extra = Vec::new();
    for path in &options.ca_files {
        let pem = credentials::read(path)?.ok_or_else(|| RegistryError::setup(path, "there is no such file"))?;
        let certificates = reqwest::Certificate::from_pem_bundle(&pem);
        let certificates =
            certificates.map_err(|e| RegistryError::setup(path, format!("no certificates in PEM: {}", causes(&e))))?;
        if certificates.is_empty() {
            return Err(RegistryError::setup(path, "there is no certificate in it"));
        }
        extra.extend(certificates);
    }
    let redirects = reqwest::redirect::Policy::custom(|attempt| {
        let secure = |url: Option<&reqwest::Url>| url.is_some_and(|url| url.scheme() == "https");
        if attempt.previous().len() > REDIRECTS {
            attempt.error(format!("more than {REDIRECTS} redirects"))
        } else if secure(attempt.previous().last()) && !secure(Some(attempt.url())) {
            attempt.error("a redirect from https to http")
        } else {
            attempt.follow()
        }
    });
    reqwest::Client::builder()
        .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(options.timeout.min(Duration::from_secs(20)))
        .redirect(redirects)
        .referer(false)
        .tls_certs_merge(extra)
        .build()
        .map_err(|e| RegistryError::Tls(causes(&e)))
}

/// The machine's `registries.conf` with what lies beside it, or the user's own.
fn read_registries() -> Result<Registries, RegistryError> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")));
    let home = home.map(|dir| dir.join("containers/registries.conf")).filter(|path| path.exists());
    let main = set("CONTAINERS_REGISTRIES_CONF").or(home).unwrap_or_else(|| "/etc/containers/registries.conf".into());
    let mut files = vec![main.clone()];
    let mut drop_ins: Vec<PathBuf> = std::fs::read_dir(main.with_extension("conf.d"))
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
        .unwrap_or_default();
    drop_ins.retain(|path| path.extension().is_some_and(|extension| extension == "conf"));
    drop_ins.sort();
    files.extend(drop_ins);
    let mut registries = Registries::default();
    for path in files {
        let Some(bytes) = credentials::read(&path)? else { continue };
        let text = String::from_utf8(bytes).map_err(|_| RegistryError::setup(&path, "it is not text"))?;
        registries.extend(Registries::parse(&text).map_err(|e| bad_registries(&path, e))?);
    }
    Ok(registries)
}

fn bad_registries(path: &Path, why: String) -> RegistryError {
    RegistryError::setup(path, format!("it is not valid: {why}"))
}

/// The error and what caused it; `reqwest` tells the cause only when asked. Addresses are left out: signed ones are secrets.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    if let Some(at) = text.find(" for url (") {
        text.truncate(at);
    }
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    super::reference::printable(&text, 500)
}
