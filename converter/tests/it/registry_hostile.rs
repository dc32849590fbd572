//! Registries that answer what they should not.

use crate::support::Place;
use crate::support_registry::{Answer, Asked, Server, dsec, fails};
use fixtures::registry::{PASSWORD, USER};
use fs3_client::Digest;
use serde_json::json;
use std::process::Command;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn convert(place: &Place, server: &Server) -> Command {
    let (home, store) = (place.path("home"), place.path("s"));
    let name = format!("docker://{}/team/app:1", server.address);
    let args = [
        "convert",
        &name,
        "--store",
        store.to_str().unwrap(),
        "--name",
        "a:b",
        "--attempts",
        "1",
        "--connection-timeout",
        "5",
    ];
    dsec(&home, &args)
}

/// Answers a question about the manifest; anything else is not there.
fn manifest(answer: Answer) -> Server {
    Server::start(move |asked| if asked.target.contains("/manifests/") { answer.clone() } else { Answer::new(404, "") })
}

#[test]
fn manifests_that_are_none() {
    let place = Place::new();
    let schema1 =
        json!({ "schemaVersion": 1, "name": "team/app", "tag": "1", "fsLayers": [], "history": [] }).to_string();
    let deep = "[".repeat(200_000);
    let many = json!({ "schemaVersion": 2, "manifests": vec![json!({ "mediaType": MANIFEST, "digest": "sha256:x", "size": 1 }); 3] });
    for (media_type, body, code, part) in [
        (
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
            schema1.as_bytes(),
            1,
            "schema 1 is not supported",
        ),
        ("application/json", schema1.as_bytes(), 1, "schema 1 is not supported"),
        (MANIFEST, &vec![b' '; (4 << 20) + 1], 3, "more than the 4194304 bytes"),
        (MANIFEST, b"", 1, "not valid"),
        (MANIFEST, deep.as_bytes(), 1, "not valid"),
        (MANIFEST, b"{\"manifests\":[]}", 1, "it is an index, its descriptor says manifest"),
        (MANIFEST, b"{\"config\":{},\"layers\":[]}", 1, "not valid"),
        ("text/html", b"<html>log in</html>", 1, "neither an image manifest nor an index"),
        ("", b"\xff\xfe", 1, "neither an image manifest nor an index"),
        ("application/json", many.to_string().as_bytes(), 1, "sha256:x"),
    ] {
        let server = manifest(Answer::new(200, body).with("content-type", media_type));
        fails(&mut convert(&place, &server), code, &[part]);
    }
    let of_another = Answer::new(200, "{}")
        .with("content-type", MANIFEST)
        .with("docker-content-digest", Digest::of(b"").to_string());
    fails(&mut convert(&place, &manifest(of_another)), 3, &["its digest is"]);
}

#[test]
fn answers_without_sense() {
    let place = Place::new();
    for (answer, part) in [
        (Answer::new(401, ""), "401"),
        (Answer::new(401, "").with("www-authenticate", "Negotiate, =,, \""), "401"),
        (
            Answer::new(401, "").with("www-authenticate", "Bearer realm=\"file:///etc/passwd\""),
            "no address: `file:///etc/passwd`",
        ),
        (Answer::new(401, "").with("www-authenticate", "Bearer realm=\"nowhere\""), "no address: `nowhere`"),
        (
            Answer::new(403, r#"{"errors":[{"code":"DENIED","message":"go\u0000away"}]}"#),
            "403 Forbidden to somebody without credentials: go\u{fffd}away",
        ),
        (Answer::new(418, "x"), "418"),
        (Answer::new(204, ""), "204"),
        (Answer::new(429, "").with("retry-after", "999999999999999999999"), "429"),
        (Answer::new(302, "").with("location", "ftp://x/"), "scheme is not allowed"),
        (Answer::new(200, "short").with("content-length", "5000"), "failed to read"),
    ] {
        fails(&mut convert(&place, &manifest(answer)), 1, &[part]);
    }
    let round = Server::start(|asked: &Asked| Answer::new(307, "").with("location", format!("{}x", asked.target)));
    fails(&mut convert(&place, &round), 1, &["more than 5 redirects"]);
    assert!(round.asked().len() < 10);
}

#[test]
fn token_servers_without_sense() {
    let place = Place::new();
    for (answer, part) in [
        (Answer::new(200, r#"{"token":"a\nauthorization: x"}"#), "cannot be sent"),
        (Answer::new(200, "{}"), "no token in it"),
        (Answer::new(200, vec![b'x'; 300 << 10]), "more than the"),
        (Answer::new(200, format!("{{\"token\":\"{}\"}}", "a".repeat(70_000))), "more than the 65536"),
        (Answer::new(500, ""), "its token server 127.0.0.1 answers 500"),
        (Answer::new(403, ""), "gives no token to somebody without credentials"),
        (Answer::new(200, r#"{"token":"refused-all-the-same","expires_in":-1}"#), "401"),
    ] {
        let tokens = Server::start(move |_| answer.clone());
        let challenge = format!("Bearer realm=\"http://{}/token\",service=\"x\"", tokens.address);
        let server = Server::start(move |_| Answer::new(401, "").with("www-authenticate", &*challenge));
        let (code, said) = crate::support_registry::outcome(&mut convert(&place, &server));
        assert!(code != 0 && code != 101 && said.contains(part), "{part}: {said}");
        assert!(server.asked().len() <= 3 && tokens.asked().len() == 1, "no end: {:?}", server.asked());
    }
}

/// Credentials are for the registry, not for where it sends us.
#[test]
fn credentials_stay_with_their_host() {
    let place = Place::new();
    let elsewhere = Server::start(|_| Answer::new(401, "").with("www-authenticate", "Basic realm=\"yours\""));
    let config = json!({ "os": "linux", "architecture": "amd64", "rootfs": { "diff_ids": [] } }).to_string();
    let digest = Digest::of(config.as_bytes()).to_string();
    let document = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "layers": [],
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest, "size": config.len() },
    });
    let body = document.to_string();
    let to = format!("http://localhost:{}/blob", elsewhere.address.port());
    let server = Server::start(move |asked| match asked.headers.get("authorization") {
        None => Answer::new(401, "").with("www-authenticate", "Basic realm=\"x\""),
        Some(_) if asked.target.contains("/manifests/") => Answer::new(200, &*body).with("content-type", MANIFEST),
        Some(_) => Answer::new(307, "").with("location", &*to),
    });
    let auth = place.path("auth.json");
    // The words of `echo -n tester:secret | base64`.
    assert_eq!((USER, PASSWORD), ("tester", "secret"));
    let auths = json!({ "auths": { server.address.to_string(): { "auth": "dGVzdGVyOnNlY3JldA==" } } });
    std::fs::write(&auth, auths.to_string()).unwrap();
    fails(convert(&place, &server).arg("--authfile").arg(&auth), 1, &["401", "from localhost"]);
    let asked = elsewhere.asked();
    assert_eq!(asked.len(), 1, "another host's question is not answered: {asked:?}");
    assert!(!asked[0].headers.contains_key("authorization"), "{asked:?}");
    assert_eq!(asked[0].target, "/blob");
}

/// A layer that images need not carry, but this registry does; and one that it does not.
#[test]
fn foreign_layers() {
    let place = Place::new();
    let layer = fixtures::oci::Layer::text("f a \"x\"");
    let source = place.layout(std::slice::from_ref(&layer));
    let expected = crate::program::run(&mut crate::program::convert(&source, &place.path("e"), "a:b"));
    let layout = place.path("oci");
    let index: serde_json::Value = serde_json::from_slice(&std::fs::read(layout.join("index.json")).unwrap()).unwrap();
    let blob = move |digest: &str| std::fs::read(layout.join("blobs").join(digest.replacen(':', "/", 1)));
    let mut document: serde_json::Value =
        serde_json::from_slice(&blob(index["manifests"][0]["digest"].as_str().unwrap()).unwrap()).unwrap();
    document["layers"][0]["mediaType"] = json!("application/vnd.oci.image.layer.nondistributable.v1.tar");
    let body = document.to_string();
    let layer_digest = document["layers"][0]["digest"].as_str().unwrap().to_owned();
    let serve = move |carried: bool| {
        let (body, blob, layer_digest) = (body.clone(), blob.clone(), layer_digest.clone());
        Server::start(move |asked| {
            let digest = asked.target.rsplit('/').next().unwrap_or_default();
            match asked.target.contains("/manifests/") {
                true => Answer::new(200, &*body).with("content-type", MANIFEST),
                false if digest == layer_digest && !carried => Answer::new(404, ""),
                false => blob(digest).map_or_else(|_| Answer::new(404, ""), |bytes| Answer::new(200, bytes)),
            }
        })
    };
    let there = crate::program::run(convert(&place, &serve(true)).arg("--json"));
    assert_eq!(there["layers"][0]["metadata"], expected["layers"][0]["metadata"]);
    fails(&mut convert(&place, &serve(false)), 1, &["is foreign"]);
}
