// Search when the site is opened from disk. Browsers refuse a worker to a page of a `file:` address,
// so the search script runs in a hidden frame instead. Served over HTTP, this file does nothing.
// mkdocs-material's `offline` plugin knows it by its name, and then fetches nothing from a network.

class IFrameWorker extends EventTarget {
  constructor(address) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    // Written at once: some browsers would else replace the empty document a moment later.
    const blank = this.frame.contentDocument;
    blank.open();
    blank.write("<!doctype html><body></body>");
    blank.close();
    const inside = this.frame.contentWindow;
    // What the script posts goes out of the frame; scripts that it asks for are loaded in order.
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inside.importScripts = async (...addresses) => {
      for (const each of addresses) await this.load(each);
    };
    this.ready = this.load(new URL(address, document.baseURI).href);
  }

  load(address) {
    const inside = this.frame.contentDocument;
    return new Promise((done, failed) => {
      const script = inside.createElement("script");
      Object.assign(script, { src: address, onload: done, onerror: failed });
      inside.body.append(script);
    });
  }

  // In order: whatever is posted before the script is there waits for it.
  postMessage(data) {
    this.ready = this.ready.then(() => {
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    });
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
